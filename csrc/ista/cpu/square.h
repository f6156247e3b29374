// Passes over (dim, dim) matrices that read one matrix transposed, tile by tile.
#pragma once

#include "elementwise.h"

namespace {
namespace ista {

using crate_kernels::IstaSquare;

constexpr int kBand = crate_kernels::kIstaBand;

// The rows of one band, columns [begin, begin + kBand) of the matrix.
struct Tile {
  alignas(64) float at[kBand][kBand];
};

CRATE_INLINE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// tile[r][c] = m[column + c][row + r]: reads whole lines, and transposes in the cache.
CRATE_INLINE void load_transposed(const float* m, int64_t dim, int64_t row, int64_t column, Tile& tile) {
  const int64_t rows = least(kBand, dim - row), columns = least(kBand, dim - column);
  for (int64_t c = 0; c < columns; ++c) {
    const float* const line = m + (column + c) * dim + row;
    for (int64_t r = 0; r < rows; ++r) tile.at[r][c] = line[r];
  }
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
  Tile tile;
  load_transposed(b, s.dim, row, column, tile);
  const int n = static_cast<int>(least(kBand, s.dim - column));
  for (int64_t r = 0; r < least(kBand, s.dim - row); ++r) combine(s, row + r, column, n, sign, tile.at[r]);
}

void subtract_symmetric(const IstaSquare& s, int64_t band) {
  const int64_t row = band * kBand;
  for (int64_t column = 0; column < row; column += kBand) combine_transposed(s, row, column, -1.0f, s.b);
  for (int64_t r = row; r < least(row + kBand, s.dim); ++r) {
    for (int64_t column = row; column < s.dim; column += kSegment) {
      const int n = static_cast<int>(least(kSegment, s.dim - column));
      combine(s, r, column, n, -1.0f, s.b + r * s.dim + column);
    }
  }
}

void add_transposed(const IstaSquare& s, int64_t band) {
  for (int64_t column = 0; column < s.dim; column += kBand) combine_transposed(s, band * kBand, column, 1.0f, s.a);
}

}  // namespace ista
}  // namespace
