// Packed sequences on a CPU: rows one behind the other, by offsets.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "tensor.h"

namespace crate_kernels {

// Clears what is written to `total` rows where some are before the first sequence or after the last.
inline void clear_uncovered(const std::optional<Tensor>& cu_seqlens, int64_t total,
                            std::initializer_list<const Tensor*> written) {
  if (!cu_seqlens.has_value()) return;
  const int32_t* const bounds = static_cast<const int32_t*>(cu_seqlens->data_ptr());
  if (bounds[0] <= 0 && bounds[cu_seqlens->size(0) - 1] >= total) return;
  for (const Tensor* const t : written) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(t->get()));
}

}  // namespace crate_kernels
