// What a call of packed sequences that was checked before is asked again: whether the values of its offsets fit.
#include "packing.h"

#include <torch/csrc/stable/library.h>

namespace crate_kernels {
namespace {

// Whether offsets on a CPU rise within 0 to `total`, and no sequence is above `max_seqlen`. Python says what does not.
bool offsets_fit(Tensor cu_seqlens, int64_t total, int64_t max_seqlen) {
  int32_t type = 0;
  int64_t stored = 0, first = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(cu_seqlens.get(), &type));
  if (type != aoti_torch_device_type_cpu() || cu_seqlens.scalar_type() != ScalarType::Int || cu_seqlens.dim() != 1) {
    return false;
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(cu_seqlens.get(), &stored));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(cu_seqlens.get(), &first));
  const int64_t count = cu_seqlens.size(0), step = cu_seqlens.stride(0);
  if (count == 0 || (first + (count - 1) * step + 1) * static_cast<int64_t>(sizeof(int32_t)) > stored) return false;
  const int32_t* const bounds = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  int64_t before = bounds[0];
  if (before < 0 || bounds[(count - 1) * step] > total) return false;
  for (int64_t i = 1; i < count; ++i) {
    const int64_t bound = bounds[i * step];
    if (bound < before || bound - before > max_seqlen) return false;
    before = bound;
  }
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("offsets_fit(Tensor cu_seqlens, int total, int max_seqlen) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("offsets_fit", TORCH_BOX(&offsets_fit));
}

}  // namespace crate_kernels
