// Element types of the tensors that kernels read and write. Arithmetic is in fp32.
#pragma once

#include <cstdint>

namespace crate_kernels {

enum class Dtype : int { f32, bf16, f16 };

static constexpr int64_t itemsize(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : 2;
}

// Contiguous elements of one dtype; null `data`: operand absent.
struct Operand {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
};

}  // namespace crate_kernels
