// Turns PyTorch's stable tensors into the plain structs that instruction-set units take.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "dtype.h"

namespace crate_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    default:
      STD_TORCH_CHECK(false, "dtype must be float32, bfloat16 or float16, got scalar type ",
                      static_cast<int>(t.scalar_type()));
  }
}

// Bytes of its storage that a tensor of such sizes, strides and offset reaches, 0 of an empty one. Who frees a storage,
// or cuts it, leaves those of its tensors.
inline int64_t reach_of(int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype) {
  int64_t last = offset;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return (last + 1) * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

}  // namespace crate_kernels
