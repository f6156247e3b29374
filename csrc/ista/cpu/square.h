// Passes over matrices that read one transposed, tile by tile.
#pragma once

#include "../../common/cpu/transpose.h"
#include "elementwise.h"

namespace {
namespace ista {

using crate_kernels::IstaSquare;
using crate_kernels::IstaTranspose;

constexpr int kBand = crate_kernels::kIstaBand;

// The rows of one band, columns [begin, begin + kBand) of the matrix.
struct BandTile {
  alignas(64) float at[kBand][kBand];
};

CRATE_INLINE int64_t minimum(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// out[c][r] = in[r][c] for r < rows <= kBand and c < columns. A line of `out` is written at once.
CRATE_INLINE void transpose_rows(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
                                 int64_t out_stride) {
  const int64_t whole = rows == kBand ? columns / kLanes * kLanes : 0;
  for (int64_t c = 0; c < whole; c += kLanes) {
    for (int64_t r = 0; r < kBand; r += kLanes) {
      transpose_block(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = whole; c < columns; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
}

void transpose(const IstaTranspose& t, int64_t band) {
  const int64_t row = band * kBand;
  transpose_rows(t.in + row * t.columns, t.columns, minimum(kBand, t.rows - row), t.columns, t.out + row, t.rows);
}

// out[row][column + c] = a[row][column + c] + sign * b[c] for c < n <= kSegment.
CRATE_INLINE void combine(const IstaSquare& s, int64_t row, int64_t column, int n, float sign, const float* b) {
  alignas(64) float scratch[kSegment];
  const int64_t at = row * s.dim + column;
  const float* const a = s.a + at;
  float* const out = target(s.out, at, scratch);
  for (int c = 0; c < n; ++c) out[c] = a[c] + sign * b[c];
  finish(s.out, at, n, out);
}

CRATE_INLINE void combine_transposed(const IstaSquare& s, int64_t row, int64_t column, float sign, const float* b) {
  BandTile tile;
  const int64_t rows = minimum(kBand, s.dim - row);
  const int n = static_cast<int>(minimum(kBand, s.dim - column));
  transpose_rows(b + column * s.dim + row, s.dim, n, rows, tile.at[0], kBand);
  for (int64_t r = 0; r < rows; ++r) combine(s, row + r, column, n, sign, tile.at[r]);
}

void subtract_symmetric(const IstaSquare& s, int64_t band) {
  const int64_t row = band * kBand;
  for (int64_t column = 0; column < row; column += kBand) combine_transposed(s, row, column, -1.0f, s.b);
  for (int64_t r = row; r < minimum(row + kBand, s.dim); ++r) {
    for (int64_t column = row; column < s.dim; column += kSegment) {
      const int n = static_cast<int>(minimum(kSegment, s.dim - column));
      combine(s, r, column, n, -1.0f, s.b + r * s.dim + column);
    }
  }
}

void add_transposed(const IstaSquare& s, int64_t band) {
  for (int64_t column = 0; column < s.dim; column += kBand) combine_transposed(s, band * kBand, column, 1.0f, s.a);
}

}  // namespace ista
}  // namespace
