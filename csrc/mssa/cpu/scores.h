// The weights of a tile from its scores. Logarithms and exponentials are to base 2 throughout.
#pragma once

#include "tile.h"

namespace {

// Destinations of the sums of a tile's weights; null: not wanted.
struct TileSums {
  float* row;  // kLanes partial sums per row
  float* column;
};

CRATE_INLINE void clear(const TileSums& sums, int64_t tokens) {
  memset(sums.row, 0, round_up(tokens, kLanes) * kLanes * sizeof(float));
  memset(sums.column, 0, round_up(tokens, kTile) * sizeof(float));
}
CRATE_INLINE float total_of(const TileSums& sums, int64_t token) {
  return sum(load(sums.row + token * kLanes)) + sums.column[token];
}
// The totals of up to kTile tokens.
CRATE_INLINE void totals_of(const TileSums& tile_sums, int64_t token, int count, float* total) {
  for (int n = 0; n < count; n += kLanes) {
    Vf rows[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) rows[r] = load(tile_sums.row + (token + n + r) * kLanes);
    store(total + n, sums(rows) + load(tile_sums.column + token + n));
  }
}
// The destination of a pair's sums: partial sums of its rows; sums of its columns in `column`, for add_columns.
CRATE_INLINE TileSums sums_at(const TileSums& sums, int i, float* column) {
  return {sums.row + static_cast<int64_t>(i) * kTile * kLanes, column};
}
// Sums the columns of a tile first, then adds to the total. Adding each weight to the total would round the weight to
// the total's precision: four times eager's error at 8192 tokens.
CRATE_INLINE void add_columns(const TileSums& sums, int j, const float* tile) {
  float* const total = sums.column + j * kTile;
  for (int n = 0; n < kTile; n += kLanes) store(total + n, load(total + n) + load(tile + n));
}

// Inputs of the tile of query block i and key block j; arrays start at the tile's tokens.
struct Scores {
  const float *query_panel, *key_panel;
  int words;          // a token's channels
  int rows, columns;  // tokens in the tile
  float factor;       // scale * log2(e)
  bool huge;          // some products may be infinite times the factor, and finite times the scale
  // weight = 2^(factor * w_i . w_j - row_shift_i - row_power_i - column_power_j); null: 0. Powers are integers, and not
  // rounded to the precision of what they are subtracted from.
  const float *row_shift, *row_power, *column_power;
  const int32_t *first, *stop;  // keys [first, stop) that each row sees; null: all of the tile
  int start;                    // the tile's first key
  const float* column_mass;     // factor of a column's weight in the row sums
  const float* row_mass;        // factor of a row's weight in the column sums
  TileSums sums;                // of rounded weights
  TileSums exact_sums;          // of exact weights; wanted if they differ from rounded ones
  float* exact;                 // null, or kTile x kTile weights before rounding
  bool symmetric;               // a block of tokens against itself: sums by columns only, each weight computed once
};

// Scores from 2^126 bits on, of which a largest number in nats has 1.4 times too many, at half their slope. Such scores
// are equal, or further apart than any weight shows.
constexpr float kHugeScore = 0x1p126f;

template <int kRows, int kColumns>
CRATE_INLINE void halve_slopes(const Scores& s, Vf (&e)[kRows][kColumns]) {
  for_each_vector(e, [&](Vf& x, int, int) CRATE_LAMBDA {
    const Vf half = x * (0.5f * s.factor), bend = splat(0.5f * kHugeScore);
    const Vf bent = select(half > bend, half + bend, select(half < -bend, half - bend, half + half));
    x = bent / s.factor;
  });
}
// Undoes it for a number of bits.
CRATE_INLINE double whole_slope(double bits) {
  const double bend = kHugeScore;
  return bits > bend ? 2.0 * bits - bend : bits < -bend ? 2.0 * bits + bend : bits;
}

// Lanes of the vector at column j that row r sees.
CRATE_INLINE Vi seen(const Scores& s, int r, int j) {
  const Vi key = iota() + (s.start + j);
  return (key >= s.first[r]) & (key < s.stop[r]);
}

template <int kRows, int kColumns>
CRATE_INLINE void add_sums(const Vf (&e)[kRows][kColumns], const Scores& s, const TileSums& sums, int r0, int j0) {
  if (sums.row != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vf total = load(sums.row + (r0 + r) * kLanes);
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) {
        // Products sum the columns of this block: do not mix the roundings of its rows and of its columns.
        if (s.symmetric && j0 / kLanes + v == r0 / kLanes) continue;
        total += e[r][v] * load(s.column_mass + j0 + v * kLanes);
      }
      store(sums.row + (r0 + r) * kLanes, total);
    }
  }
  if (sums.column != nullptr) {
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      Vf total = {};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) total += e[r][v] * s.row_mass[r0 + r];
      store(sums.column + j0 + v * kLanes, load(sums.column + j0 + v * kLanes) + total);
    }
  }
}

// e = 2^(factor * e - shifts - powers), four vectors at a time.
template <bool kShift, bool kPower, int kRows, int kColumns>
CRATE_INLINE void exponentials_less(const Scores& s, int r0, int j0, Vf (&e)[kRows][kColumns]) {
  constexpr int kCount = kRows * kColumns, kStep = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma GCC unroll 24
  for (int first = 0; first < kCount; first += kStep) {
    Vf x[kStep], power[kStep];
#pragma GCC unroll 4
    for (int n = 0; n < kStep; ++n) {
      const int r = (first + n) / kColumns, v = (first + n) % kColumns;
      // Round before the shift, as maxima are rounded. So the largest weight of a row that is shifted by its maximum is
      // exactly 1, and a symmetric pair has one weight, wherever in a tile it is computed.
      x[n] = rounded(e[r][v] * s.factor);
      if (kShift) x[n] -= s.row_shift[r0 + r];
      if (kPower) power[n] = splat(s.row_power[r0 + r]);
      if (kPower && s.column_power != nullptr) power[n] += load(s.column_power + j0 + v * kLanes);
    }
    exp2(x, kPower ? power : nullptr);
#pragma GCC unroll 4
    for (int n = 0; n < kStep; ++n) e[(first + n) / kColumns][(first + n) % kColumns] = x[n];
  }
}

template <int kRows, int kColumns>
CRATE_INLINE void exponentials(const Scores& s, int r0, int j0, Vf (&e)[kRows][kColumns]) {
  if (s.row_power == nullptr) return exponentials_less<true, false>(s, r0, j0, e);
  if (s.row_shift == nullptr) return exponentials_less<false, true>(s, r0, j0, e);
  exponentials_less<true, true>(s, r0, j0, e);
}

// weights = 2^(scores - shifts - powers), their sums by row and, for the symmetric pair, by column.
template <class T>
void compute_weights(const Scores& s, WeightTile<T>& weights) {
  const ChannelProducts<T> products(s.query_panel, s.key_panel, s.words, s.rows, s.columns);
  by_length<T>(s.words, [&](auto longer) CRATE_LAMBDA {
    constexpr int kLong = decltype(longer)::value;
    const auto weigh = [&](auto rows, int r0, auto columns, int v0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value, kColumns = decltype(columns)::value;
      const int j0 = v0 * kLanes;
      Vf e[kRows][kColumns] = {};
      products.template add<kLong>(e, r0, j0);
      if (s.huge) halve_slopes(s, e);
      exponentials(s, r0, j0, e);
      const auto at = [&](int r, int v) { return (r0 + r) * kTile + j0 + v * kLanes; };
      if (s.first != nullptr) {
        for_each_vector(
            e, [&](Vf& x, int r, int v) CRATE_LAMBDA { x = select(seen(s, r0 + r, j0 + v * kLanes), x, Vf{}); });
      }
      if (s.exact != nullptr) {
        for_each_vector(e, [&](Vf& x, int r, int v) CRATE_LAMBDA { store(s.exact + at(r, v), x); });
      }
      // The normaliser sums rounded weights, as the products do; lse sums exact ones.
      if (T::kPair == 2) add_sums(e, s, s.exact_sums, r0, j0);
      weights.template put<kRows, kColumns>(e, r0, v0);
      add_sums(e, s, s.sums, r0, j0);
    };
    for_groups<T>(s.rows, s.columns, s.symmetric, weigh);
  });
  weights.complete(s.rows, s.columns, s.symmetric);
}

// The weights of a tile as products take them, and before they are rounded.
template <class T>
class TileWeights {
 public:
  void compute(Scores s) {
    s.exact = T::kPair == 1 ? nullptr : exact_;
    compute_weights<T>(s, operand);
  }
  const float* exact() const { return T::kPair == 1 ? operand.by_row : exact_; }

  WeightTile<T> operand;

 private:
  alignas(64) float exact_[T::kPair == 1 ? 1 : kTile * kTile];
};

// maxima[r] = max(maxima[r], factor * w_r . w_j) over the columns the row may see; kLanes partial maxima per row.
template <class T>
void update_maxima(const Scores& s, float* maxima) {
  const ChannelProducts<T> products(s.query_panel, s.key_panel, s.words, s.rows, s.columns);
  by_length<T>(s.words, [&](auto longer) CRATE_LAMBDA {
    constexpr int kLong = decltype(longer)::value;
    for_column_groups(0, (s.columns + kLanes - 1) / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
      constexpr int kColumns = decltype(columns)::value;
      for_row_groups<kColumns>(0, s.rows, [&](auto rows, int r0) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        Vf e[kRows][kColumns] = {};
        products.template add<kLong>(e, r0, v0 * kLanes);
        if (s.huge) halve_slopes(s, e);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          Vf largest = load(maxima + (r0 + r) * kLanes);
#pragma GCC unroll 4
          for (int v = 0; v < kColumns; ++v) {
            const Vf score = rounded(e[r][v] * s.factor);
            const bool masked = s.first != nullptr;
            largest =
                max(largest, masked ? select(seen(s, r0 + r, (v0 + v) * kLanes), score, splat(-INFINITY)) : score);
          }
          store(maxima + (r0 + r) * kLanes, largest);
        }
      });
    });
  });
}

}  // namespace
