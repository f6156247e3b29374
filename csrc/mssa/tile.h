// One 64 x 64 tile of scores and what is made of it. Logarithms and exponentials are to base 2 throughout.
#pragma once

#include "operand.h"

namespace {

// Weights of a tile, as left operands of both sums over tokens. With one element a word the two layouts are
// one; with two, words pair neighbours along the index that the product sums.
template <class T>
struct Tile {
  static constexpr int kRowWords = kTile / T::kPair;
  alignas(64) float by_row[kTile * kRowWords];                         // sums over columns
  alignas(64) float by_column[T::kPair == 1 ? 1 : kTile * kRowWords];  // sums over rows

  // Store rounded weights of rows r0.. and vectors v0..
  template <int kRows, int kColumns>
  CRATE_INLINE void put(const Vf (&e)[kRows][kColumns], int r0, int v0) {
    if constexpr (T::kPair == 1) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) store(by_row + (r0 + r) * kTile + (v0 + v) * kLanes, e[r][v]);
      }
    } else {
      // `e` holds bf16 values as floats, so a shift is the conversion.
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const Vu even = (Vu)e[r][v] >> 16, odd = (Vu)e[r + 1 < kRows ? r + 1 : r][v] >> 16;
          put_half(by_row + (r0 + r) * kRowWords + (v0 + v) * (kLanes / 2), even);
          put_half(by_row + (r0 + r + 1) * kRowWords + (v0 + v) * (kLanes / 2), odd);
          store(by_column + (r0 + r) / 2 * kTile + (v0 + v) * kLanes, (Vf)(even | (odd << 16)));
        }
      }
    }
  }

 private:
  static CRATE_INLINE void put_half(float* out, Vu low) {
#if CRATE_BF16_DOT
    const __m256i half = _mm512_cvtepi32_epi16((__m512i)low);
    memcpy(out, &half, sizeof half);
#endif
  }
};

// Left operands and their strides in words.
struct ByRow {};     // Tile::by_row
struct ByColumn {};  // Tile::by_column, and panels: the tokens of a tile side by side

template <class T, class Order>
struct Strides;
template <class T>
struct Strides<T, ByRow> {
  static constexpr int kRow = kTile / T::kPair, kWord = 1;
  static CRATE_INLINE const float* of(const Tile<T>& tile) { return tile.by_row; }
};
template <class T>
struct Strides<T, ByColumn> {
  static constexpr int kRow = 1, kWord = kTile;
  static CRATE_INLINE const float* of(const Tile<T>& tile) { return T::kPair == 1 ? tile.by_row : tile.by_column; }
};

// Where a tile adds the sums of its weights; null: not wanted.
struct Sums {
  float* row;  // kLanes partial sums a row
  float* column;
};

// What the tile of query block i and key block j is computed from; arrays start at the tile's tokens.
struct Scores {
  const float *query_panel, *key_panel;
  int words;                  // a token's channels
  int rows, columns;          // tokens in the tile
  float factor;               // scale * log2(e)
  const float* row_shift;     // weight = 2^(factor * w_i . w_j - row_shift_i - column_shift_j)
  const float* column_shift;  // null: 0
  const int32_t* limit;       // null, or how many of the tile's columns each row may see
  const float* column_mass;   // what a column's weight counts in the row sums
  const float* row_mass;      // and a row's in the column sums
  Sums sums;                  // of rounded weights
  Sums exact_sums;            // of exact ones; wanted where they differ
  float* exact;               // null, or kTile x kTile weights before rounding
};

// Rows a bf16 tile computes: pairs, the last possibly with a row of padding.
template <class T>
CRATE_INLINE int whole_rows(int rows) {
  return static_cast<int>(round_up(rows, T::kPair));
}

template <int kRows, int kColumns>
CRATE_INLINE void add_sums(const Vf (&e)[kRows][kColumns], const Scores& s, const Sums& sums, int r0, int j0) {
  if (sums.row != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vf total = load(sums.row + (r0 + r) * kLanes);
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) total += e[r][v] * load(s.column_mass + j0 + v * kLanes);
      store(sums.row + (r0 + r) * kLanes, total);
    }
  }
  if (sums.column != nullptr) {
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      Vf total = load(sums.column + j0 + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) total += e[r][v] * s.row_mass[r0 + r];
      store(sums.column + j0 + v * kLanes, total);
    }
  }
}

// weights = 2^(scores - shifts), their sums by row and, for the symmetric pair, by column.
template <class T>
void compute_weights(const Scores& s, Tile<T>& weights) {
  const int vectors = (s.columns + kLanes - 1) / kLanes;
  for_column_groups(vectors, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    const int j0 = v0 * kLanes;
    for_row_groups<kColumns>(whole_rows<T>(s.rows), [&](auto rows, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      Vf e[kRows][kColumns] = {};
      multiply<T, kRows, kColumns, 1, kTile>(e, s.query_panel + r0, s.key_panel + j0, kTile, s.words);
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) {
        const int j = j0 + v * kLanes;
        const Vf shift = s.column_shift == nullptr ? Vf{} : load(s.column_shift + j);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          if (s.column_shift != nullptr) {
            e[r][v] = exp2(e[r][v] * s.factor - (splat(s.row_shift[r0 + r]) + shift));
          } else {
            // Rounded before the shift, as maxima are: the largest weight of such a row is exactly 1.
            e[r][v] = exp2(rounded(e[r][v] * s.factor) - s.row_shift[r0 + r]);
          }
        }
      }
      if (s.limit != nullptr) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const Vi column = iota() + (j0 + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) e[r][v] = select(column < s.limit[r0 + r], e[r][v], Vf{});
        }
      }
      if (s.exact != nullptr) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) store(s.exact + (r0 + r) * kTile + j0 + v * kLanes, e[r][v]);
        }
      }
      // The normaliser adds what the products will, rounded weights; lse adds exact ones.
      if constexpr (T::kPair == 2) {
        add_sums(e, s, s.exact_sums, r0, j0);
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) e[r][v] = T::round(e[r][v]);
        }
      }
      add_sums(e, s, s.sums, r0, j0);
      weights.template put<kRows, kColumns>(e, r0, v0);
    });
  });
}

// maxima[r] = max(maxima[r], factor * w_r . w_j) over the columns the row may see; kLanes partial maxima a row.
template <class T>
void update_maxima(const Scores& s, float* maxima) {
  for_column_groups((s.columns + kLanes - 1) / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    for_row_groups<kColumns>(s.rows, [&](auto rows, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      Vf e[kRows][kColumns] = {};
      multiply<T, kRows, kColumns, 1, kTile>(e, s.query_panel + r0, s.key_panel + v0 * kLanes, kTile, s.words);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Vf largest = load(maxima + (r0 + r) * kLanes);
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const Vi column = iota() + (v0 + v) * kLanes;
          const int limit = s.limit == nullptr ? s.columns : s.limit[r0 + r];
          largest = max(largest, select(column < limit, rounded(e[r][v] * s.factor), splat(-INFINITY)));
        }
        store(maxima + (r0 + r) * kLanes, largest);
      }
    });
  });
}

// The gradient of the products w_i . w_j:
//   row_scale_i * weight * (dropout factor * a - column_u_j row_delta_i + b - row_u_i column_delta_j),
// where a and b are the two products of panels.
struct ScoreGradients {
  const float *left_a, *right_a, *left_b, *right_b;  // b null: one product
  int words;                                         // 0: no product at all
  int rows, columns;
  const float* weights;  // kTile x kTile
  const float* row_scale;
  const float* dropout;  // null, or kTile x kTile factors
  const float *row_delta, *column_u;
  const float *row_u, *column_delta;  // null: no second term
};

template <class T>
void compute_gradients(const ScoreGradients& s, Tile<T>& gradients) {
  for_column_groups((s.columns + kLanes - 1) / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    const int j0 = v0 * kLanes;
    for_row_groups<kColumns>(whole_rows<T>(s.rows), [&](auto rows, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      Vf d[kRows][kColumns] = {};
      multiply<T, kRows, kColumns, 1, kTile>(d, s.left_a + r0, s.right_a + j0, kTile, s.words);
      // Each product meets its delta before the next begins: where one weight is all, the two are equal to the bit.
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) {
        const int j = j0 + v * kLanes;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          if (s.dropout != nullptr) d[r][v] *= load(s.dropout + (r0 + r) * kTile + j);
          d[r][v] -= load(s.column_u + j) * s.row_delta[r0 + r];
        }
      }
      if (s.left_b != nullptr) {
        multiply<T, kRows, kColumns, 1, kTile>(d, s.left_b + r0, s.right_b + j0, kTile, s.words);
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const Vf delta = load(s.column_delta + j0 + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) d[r][v] -= delta * s.row_u[r0 + r];
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vf weight = load(s.weights + (r0 + r) * kTile + j0 + v * kLanes);
          d[r][v] = T::round(d[r][v] * (weight * s.row_scale[r0 + r]));
        }
      }
      gradients.template put<kRows, kColumns>(d, r0, v0);
    });
  });
}

// dots[j] = the product of column j of two panels, in the order in which tiles sum it.
template <class T>
void dot_columns(const float* a, const float* b, int words, float* dots) {
  for (int j = 0; j < kTile; j += kLanes) {
    Vf acc = {};
    for (int k = 0; k < words; ++k) acc = T::dot(acc, load(a + k * kTile + j), load(b + k * kTile + j));
    store(dots + j, acc);
  }
}

// out[r] += row_factor[r] * (left_a right_a)[r] + (left_b right_b)[r], summed over `tokens` tokens.
//
// A tile's product is summed from zero and then added: going on in the output costs four times the error.
template <class T, class Order>
void accumulate(float* out, int width, int rows, int tokens, const Tile<T>& left_a, const float* right_a,
                const float* row_factor, const Tile<T>* left_b, const float* right_b) {
  using S = Strides<T, Order>;
  const int words = (tokens + T::kPair - 1) / T::kPair;
  for_column_groups(width / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    for_row_groups<kColumns>(rows, [&](auto group, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(group)::value;
      Vf acc[kRows][kColumns] = {};
      multiply<T, kRows, kColumns, S::kRow, S::kWord>(acc, S::of(left_a) + r0 * S::kRow, right_a + v0 * kLanes, width,
                                                      words);
      if (row_factor != nullptr) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kColumns; ++v) acc[r][v] *= row_factor[r0 + r];
        }
      }
      if (left_b != nullptr) {
        multiply<T, kRows, kColumns, S::kRow, S::kWord>(acc, S::of(*left_b) + r0 * S::kRow, right_b + v0 * kLanes,
                                                        width, words);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          float* const p = out + (r0 + r) * static_cast<int64_t>(width) + (v0 + v) * kLanes;
          store(p, load(p) + acc[r][v]);
        }
      }
    });
  });
}

}  // namespace
