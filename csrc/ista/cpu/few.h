// Products of a few tokens, with all that follows them, without the library: a call of it takes longer there.
#pragma once

#include "elementwise.h"

namespace {
namespace ista {

using crate_kernels::IstaFew;
using crate_kernels::IstaFewDots;
using crate_kernels::IstaTerm;

constexpr int kRowsAtOnce = 4;                          // of the matrix, in dots
constexpr int kTokensAtOnce = kLanes / kRowsAtOnce;     // together they fill a vector
constexpr int kMaxRows = 6;                             // of a micro-kernel
constexpr int kMaxColumns = CRATE_LANES == 16 ? 4 : 2;  // vectors
constexpr int64_t kPart = 128;  // terms that are summed from zero: longer sums are made of such parts

// out[t][j] = base[t][j] - x[t] . weight[j] for rows j of [begin, end); without a base, the product itself.
void few_dots(const IstaFewDots& d, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kRowsAtOnce) {
    const float* const rows = d.weight + j * d.dim;
    for (int64_t t = 0; t < d.tokens; t += kTokensAtOnce) {
      const float* token[kTokensAtOnce];
      for (int n = 0; n < kTokensAtOnce; ++n) token[n] = d.x + (t + n < d.tokens ? t + n : t) * d.dim;
      Vf acc[kLanes] = {};
      for (int64_t k = 0; k < d.dim; k += kLanes) {
        Vf row[kRowsAtOnce];
#pragma GCC unroll 4
        for (int r = 0; r < kRowsAtOnce; ++r) row[r] = load(rows + r * d.dim + k);
#pragma GCC unroll 4
        for (int n = 0; n < kTokensAtOnce; ++n) {
          const Vf x = load(token[n] + k);
#pragma GCC unroll 4
          for (int r = 0; r < kRowsAtOnce; ++r) {
            acc[n * kRowsAtOnce + r] = multiply_add(acc[n * kRowsAtOnce + r], x, row[r]);
          }
        }
      }
      alignas(64) float dots[kLanes];
      store(dots, sums(acc));
      for (int n = 0; n < kTokensAtOnce && t + n < d.tokens; ++n) {
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const int64_t at = (t + n) * d.dim + j + r;
          d.out[at] = d.base == nullptr ? dots[n * kRowsAtOnce + r] : d.base[at] - dots[n * kRowsAtOnce + r];
        }
      }
    }
  }
}

// total[r][v] += sign * sum_k left[r][k] right[k][v].
template <int kRows, int kColumns>
CRATE_INLINE void add_term(Vf (&total)[kRows][kColumns], const IstaTerm& term, int64_t row, int64_t column,
                           int64_t stride, float sign) {
  const float* const left = term.left + row * term.row;
  for (int64_t first = 0; first < term.depth; first += kPart) {
    const int64_t end = first + kPart < term.depth ? first + kPart : term.depth;
    Vf acc[kRows][kColumns] = {};
    for (int64_t k = first; k < end; ++k) {
      Vf right[kColumns];
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) right[v] = load(term.right + k * stride + column + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vf a = splat(left[r * term.row + k * term.step]);
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) acc[r][v] = multiply_add(acc[r][v], a, right[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) total[r][v] += sign * acc[r][v];
    }
  }
}

// Comparisons keep NaN, as in PyTorch.
CRATE_INLINE Vf shrink(const IstaFew& f, Vf v) {
  if (f.nonnegative) {
    const Vf less = v - f.threshold;
    return select(less <= 0.0f, Vf{}, less);
  }
  if (f.threshold == 0.0f) return v;
  return select(v > f.threshold, v - f.threshold, select(v < -f.threshold, v + f.threshold, v * 0.0f));
}

template <int kRows, int kColumns>
CRATE_INLINE void few_tile(const IstaFew& f, int64_t row, int64_t column) {
  Vf total[kRows][kColumns] = {};
  if (f.added.left != nullptr) add_term(total, f.added, row, column, f.dim, 1.0f);
  if (f.subtracted.left != nullptr) add_term(total, f.subtracted, row, column, f.dim, -1.0f);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kColumns; ++v) {
      const int64_t at = (row + r) * f.dim + column + v * kLanes;
      Vf x = total[r][v];
      if (f.plus != nullptr) x += load(f.plus + at);
      x = f.base == nullptr ? f.scale * x : load(f.base + at) + f.scale * x;
      store(f.out + at, shrink(f, x));
    }
  }
}

template <int kColumns>
CRATE_INLINE void few_columns(const IstaFew& f, int64_t begin, int64_t end, int64_t column) {
  int64_t row = begin;
  for (; row + kMaxRows <= end; row += kMaxRows) few_tile<kMaxRows, kColumns>(f, row, column);
  if (row + 4 <= end) {
    few_tile<4, kColumns>(f, row, column);
    row += 4;
  }
  if (row + 2 <= end) {
    few_tile<2, kColumns>(f, row, column);
    row += 2;
  }
  if (row < end) few_tile<1, kColumns>(f, row, column);
}

// Rows [begin, end) of the columns [first, last) of out.
void few(const IstaFew& f, int64_t begin, int64_t end, int64_t first, int64_t last) {
  int64_t column = first;
  constexpr int64_t kWide = kMaxColumns * kLanes;
  for (; column + kWide <= last; column += kWide) few_columns<kMaxColumns>(f, begin, end, column);
  for (; column < last; column += kLanes) few_columns<1>(f, begin, end, column);
}

}  // namespace ista
}  // namespace
