// The gradient of a tile's scores.
#pragma once

#include "tile.h"

namespace {

// One side of a tile's gradients, rows or columns; null: absent.
struct GradientSide {
  const float *dout, *w;  // panels: of the gradient of out, and of w
  const float *delta, *dlse;
  const float* mass;  // factor of the other side's delta and dlse
  const float* rest;  // what delta lacks
};

// The gradient of the products w_i . w_j of rows i and columns j:
//   row_scale_i * weight * (dropout factor * dout_i . w_j - mass_j delta_i + w_i . dout_j - mass_i delta_j
//                           + mass_j dlse_i + mass_i dlse_j).
// delta is the sum of two numbers, delta and rest. Without column.dout, the terms with delta_j and dlse_j are absent
// too. With ratios, the sides are those of the products: the first difference has column.dlse added, and is then
// multiplied by row_ratio_i * column_ratio_j, and the second has row.dlse added.
struct ScoreGradients {
  GradientSide row, column;
  int words;  // of a panel; 0: no product at all
  int rows, columns;
  const float* weights;  // kTile x kTile
  const float* row_scale;
  const float* dropout;                   // null, or kTile x kTile factors
  const float *row_ratio, *column_ratio;  // for kRatios
  bool symmetric;                         // add by columns only
};

template <class T, bool kRatios = false>
void compute_gradients(const ScoreGradients& s, WeightTile<T>& dscore_tile) {
  const ChannelProducts<T> by_row(s.row.dout, s.column.w, s.words, s.rows, s.columns);
  const ChannelProducts<T> by_column(s.row.w, s.column.dout, s.column.dout == nullptr ? 0 : s.words, s.rows, s.columns);
  by_length<T>(s.words, [&](auto longer) CRATE_LAMBDA {
    constexpr int kLong = decltype(longer)::value;
    const auto differentiate = [&](auto rows, int r0, auto columns, int v0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value, kColumns = decltype(columns)::value;
      const int j0 = v0 * kLanes;
      Vf d[kRows][kColumns] = {};
      by_row.template add<kLong>(d, r0, j0);
      const auto at = [&](int r, int v) { return (r0 + r) * kTile + j0 + v * kLanes; };
      // Subtract each delta before the next product: where one weight is all of its row, the two are equal to the bit.
      // Subtract its rest apart: rounded into delta, it would err by an ulp of what has cancelled.
      for_each_vector(d, [&](Vf& x, int r, int v) CRATE_LAMBDA {
        if (s.dropout != nullptr) x = rounded(x * load(s.dropout + at(r, v)));
        x -= load(s.column.mass + j0 + v * kLanes) * s.row.delta[r0 + r];
        if (s.row.rest != nullptr) x -= load(s.column.mass + j0 + v * kLanes) * s.row.rest[r0 + r];
      });
      if constexpr (kRatios) {
        for_each_vector(d, [&](Vf& x, int r, int v) CRATE_LAMBDA {
          x += load(s.column.dlse + j0 + v * kLanes);
          x *= load(s.column_ratio + j0 + v * kLanes) * s.row_ratio[r0 + r];
        });
      }
      if (s.column.dout != nullptr) {
        by_column.template add<kLong>(d, r0, j0);
        for_each_vector(d, [&](Vf& x, int r, int v) CRATE_LAMBDA {
          x -= load(s.column.delta + j0 + v * kLanes) * s.row.mass[r0 + r];
          if (s.column.rest != nullptr) x -= load(s.column.rest + j0 + v * kLanes) * s.row.mass[r0 + r];
        });
      }
      // dlse comes after the differences: added to delta first, it would be rounded as delta is, and the difference may
      // be much smaller.
      if constexpr (kRatios) {
        for_each_vector(d, [&](Vf& x, int r, int) CRATE_LAMBDA { x += s.row.dlse[r0 + r]; });
      } else if (s.row.dlse != nullptr) {
        for_each_vector(d, [&](Vf& x, int r, int v) CRATE_LAMBDA {
          x += load(s.column.mass + j0 + v * kLanes) * s.row.dlse[r0 + r];
          if (s.column.dout != nullptr) x += load(s.column.dlse + j0 + v * kLanes) * s.row.mass[r0 + r];
        });
      }
      for_each_vector(d,
                      [&](Vf& x, int r, int v) CRATE_LAMBDA { x *= load(s.weights + at(r, v)) * s.row_scale[r0 + r]; });
      dscore_tile.template put<kRows, kColumns>(d, r0, v0);
    };
    for_groups<T>(s.rows, s.columns, s.symmetric, differentiate);
  });
  dscore_tile.complete(s.rows, s.columns, s.symmetric);
}

// deltas[r] += the sum over columns of weight * dropout factor * a: kLanes partial sums per row.
template <class T>
void add_deltas(const ScoreGradients& s, float* deltas) {
  const ChannelProducts<T> products(s.row.dout, s.column.w, s.words, s.rows, s.columns);
  by_length<T>(s.words, [&](auto longer) CRATE_LAMBDA {
    constexpr int kLong = decltype(longer)::value;
    const auto add = [&](auto rows, int r0, auto columns, int v0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value, kColumns = decltype(columns)::value;
      const int j0 = v0 * kLanes;
      Vf d[kRows][kColumns] = {};
      products.template add<kLong>(d, r0, j0);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Vf total = load(deltas + (r0 + r) * kLanes);
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const int at = (r0 + r) * kTile + j0 + v * kLanes;
          if (s.dropout != nullptr) d[r][v] = rounded(d[r][v] * load(s.dropout + at));
          total += load(s.weights + at) * d[r][v];
        }
        store(deltas + (r0 + r) * kLanes, total);
      }
    };
    for_groups<T>(s.rows, s.columns, false, add);
  });
}

// dots[j] = the product of column j of two panels, in the order in which tiles sum it.
template <class T>
void dot_columns(const float* a, const float* b, int words, int count, float* dots) {
  if constexpr (T::kMatrix) {  // the diagonal of each block
    const int64_t line = line_words(words);
    alignas(64) float block[kLanes * kLanes];
    for (int j = 0; j < count; j += kLanes) {
      const AmxOperands operands = {a + lines_at(words) + j * line, b + j, line, kTile,
                                    static_cast<int>(line / kLanes)};
      T::multiply(operands, kLanes, kLanes, block, kLanes);
      for (int n = 0; n < kLanes; ++n) dots[j + n] = block[n * kLanes + n];
    }
    return;
  }
  for (int j = 0; j < count; j += kLanes) {
    Vf total = {};
    const int part = T::kPair == 1 ? kPart : words;
    for (int first = 0; first < words; first += part) {
      Vf acc = {};
      for (int k = first; k < words && k < first + part; ++k) {
        acc = T::dot(acc, load(a + k * kTile + j), load(b + k * kTile + j));
      }
      total += acc;
    }
    store(dots + j, total);
  }
}

}  // namespace
