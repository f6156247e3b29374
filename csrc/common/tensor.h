// Turns PyTorch's stable tensors into the plain structs that instruction-set units take.
#pragma once

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

}  // namespace crate_kernels
