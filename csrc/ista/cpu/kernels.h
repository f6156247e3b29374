// The kernels that each instruction-set unit offers to ista_cpu.cpp: plain structs and function pointers only.
#pragma once

#include <stdint.h>

#include "../../common/dtype.h"

namespace crate_kernels {

// out = shrink(base + scale * product) where gate is nonzero, else 0.
struct IstaCpuUpdate {
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

// An fp32 matrix, `rows` contiguous rows of `columns`, and space for its transpose.
struct IstaTranspose {
  const float* in;
  float* out;
  int64_t rows, columns;
};

// Rows of a matrix per task. Products that compute one half of a symmetric matrix have the same bands.
constexpr int64_t kIstaBand = 16;

// fp32 products of a few tokens: contiguous rows of `dim`, whole vectors of every level.
struct IstaFewDots {
  const float *x, *weight;
  const float* base;  // null: absent
  float* out;
  int64_t tokens, dim;
};

// A sum over `depth` rows of `right`; left[r][k] at left[r * row + k * step].
struct IstaTerm {
  const float* left;  // null: no term
  int64_t row, step;
  const float* right;
  int64_t depth;
};

// out = shrink(base + scale * (plus + added - subtracted)); null: 0.
struct IstaFew {
  IstaTerm added, subtracted;
  const float *base, *plus;
  float* out;
  int64_t dim;
  float scale, threshold;
  bool nonnegative;
};

struct IstaKernels {
  // Elements [begin, end). The output may be any of the inputs.
  void (*update)(const IstaCpuUpdate&, int64_t begin, int64_t end);
  // Band `band` of out = a - b. b is symmetric, and stored only from each band's own columns on.
  void (*subtract_symmetric)(const IstaSquare&, int64_t band);
  // Band `band` of out = a + a^T.
  void (*add_transposed)(const IstaSquare&, int64_t band);
  // Band `band` of the rows, as columns of the output.
  void (*transpose)(const IstaTranspose&, int64_t band);
  // Rows [begin, end) of the weight, columns of out; multiples of kIstaBand.
  void (*few_dots)(const IstaFewDots&, int64_t begin, int64_t end);
  // Rows [begin, end) of columns [first, last), which are multiples of kIstaBand.
  void (*few)(const IstaFew&, int64_t begin, int64_t end, int64_t first, int64_t last);
};

extern const IstaKernels ista_portable, ista_avx2, ista_avx512;

}  // namespace crate_kernels
