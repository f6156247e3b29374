// Turns PyTorch's stable tensors into the arguments of the kernels of subspace attention.
#pragma once

#include <cstdint>
#include <optional>

#include "../../common/cuda/launch.cuh"

namespace crate_kernels {

// A tensor of tokens; strides in elements.
struct Rows {
  void* data;
  int64_t batch, head, row, channel;
  bool wide;  // every row is whole packs of 16 bytes
};

namespace mssa {

// Access to all tensors of a call. wide: in packs of 16 bytes, because all rows are whole packs.
struct Access {
  int head_dim;
  bool wide;
};

// One head of a tensor, from its first token on; strides in elements.
template <class T>
struct View {
  T* data;
  int64_t row, channel;
};

}  // namespace mssa

// Packed tokens are (rows, heads, channels), others (batch, heads, rows, channels).
inline Rows rows_of(const Tensor& t, bool packed) {
  Rows r = {t.data_ptr(), packed ? 0 : t.stride(0), t.stride(1), t.stride(packed ? 0 : 2), t.stride(packed ? 2 : 3),
            false};
  const auto whole = [&](int64_t elements) { return elements * static_cast<int64_t>(t.element_size()) % 16 == 0; };
  r.wide = reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && whole(t.size(t.dim() - 1)) && r.channel == 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) r.wide = r.wide && (t.size(d) == 1 || whole(t.stride(d)));
  return r;
}

template <class T>
T* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

inline int head_dim_of(const Tensor& w) {
  const int64_t head_dim = w.size(w.dim() - 1);
  STD_TORCH_CHECK(head_dim >= 1 && head_dim <= 256, "head_dim must be from 1 to 256, got ", head_dim);
  return static_cast<int>(head_dim);
}

}  // namespace crate_kernels
