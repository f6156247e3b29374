// The kernels that each instruction-set unit offers to ista_cpu.cpp: plain structs and function pointers only.
#pragma once

#include <stdint.h>

#include "../../common/dtype.h"

namespace crate_kernels {

// out = shrink(base + scale * product) where gate is nonzero, else 0.
struct IstaUpdate {
  Operand product, base, gate, out;
  float scale, threshold;
  bool nonnegative;  // shrink(v) = max(v - threshold, 0), else sign(v) max(|v| - threshold, 0)
};

// Square fp32 matrices, `dim` contiguous rows; the result has any dtype.
struct IstaSquare {
  const float *a, *b;
  Operand out;
  int64_t dim;
};

// An fp32 matrix, `rows` contiguous rows of `columns`, and room for its transpose.
struct IstaTranspose {
  const float* in;
  float* out;
  int64_t rows, columns;
};

// Rows of a matrix per task. Products that compute one half of a symmetric matrix have the same bands.
constexpr int64_t kIstaBand = 16;

struct IstaKernels {
  // Elements [begin, end). The output may be any of the inputs.
  void (*update)(const IstaUpdate&, int64_t begin, int64_t end);
  // Band `band` of out = a - b. b is symmetric, and stored only from each band's own columns on.
  void (*subtract_symmetric)(const IstaSquare&, int64_t band);
  // Band `band` of out = a + a^T.
  void (*add_transposed)(const IstaSquare&, int64_t band);
  // Band `band` of the rows, as columns of the output.
  void (*transpose)(const IstaTranspose&, int64_t band);
};

extern const IstaKernels ista_portable, ista_avx2, ista_avx512;

}  // namespace crate_kernels
