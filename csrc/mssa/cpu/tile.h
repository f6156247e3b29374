// One 64 x 64 tile of weights, and the products with it on the left.
#pragma once

#include "operand.h"

namespace {

// The weights of a tile, as left operands of both sums over tokens. With one element per word, both layouts are the
// same. With two, a word pairs neighbours along the index that the product sums.
template <class T>
struct Tile {
  static constexpr int kRowWords = kTile / T::kPair;
  alignas(64) float by_row[kTile * kRowWords];                         // sums over columns
  alignas(64) float by_column[T::kPair == 1 ? 1 : kTile * kRowWords];  // sums over rows

  // Store rounded weights of rows r0.. and vectors v0..
  template <int kRows, int kColumns>
  CRATE_INLINE void put(const Vf (&e)[kRows][kColumns], int r0, int v0) {
    if constexpr (T::kPair == 1) {  // row by row: column by column, a forward of 197 tokens takes 1% longer
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

  // Completes the columns of a symmetric tile from its rows, which are there from the diagonal on. Rows are not
  // completed.
  void mirror(int columns) {
    constexpr int kWordColumns = kLanes * T::kPair;  // columns in a vector of words
    float* const to = T::kPair == 1 ? by_row : by_column;
    for (int r = 0; r + kLanes < columns; r += kLanes) {
      // With two elements per word, the first block may hold the diagonal too: it is its own mirror image.
      for (int c = (r + kLanes) / kWordColumns * kWordColumns; c < columns; c += kWordColumns) {
        transpose_block(by_row + r * kRowWords + c / T::kPair, kRowWords, to + c / T::kPair * kTile + r, kTile);
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

// How a sum reads the weights: by rows, or by columns, which are side by side.
enum class Order { rows, columns };

// Rows that a bf16 tile computes: pairs, the last possibly with a row of padding.
template <class T>
CRATE_INLINE int whole_rows(int rows) {
  return static_cast<int>(round_up(rows, T::kPair));
}

// Calls body(Int<rows>, first row, Int<columns>, first vector) for the micro-kernels that cover a tile. A symmetric
// tile is covered on and right of its diagonal only: 5/8 of the vectors if four make a row.
template <class T, class Body>
CRATE_INLINE void for_groups(int rows, int columns, bool symmetric, const Body& body) {
  const int vectors = (columns + kLanes - 1) / kLanes, whole = whole_rows<T>(rows);
  const int strip = symmetric ? kLanes : whole;
  for (int first = 0; first < whole; first += strip) {
    const int end = first + strip < whole ? first + strip : whole;
    for_column_groups(symmetric ? first / kLanes : 0, vectors, [&](auto width, int v0) __attribute__((always_inline)) {
      for_row_groups<decltype(width)::value>(
          first, end, [&](auto height, int r0) __attribute__((always_inline)) { body(height, r0, width, v0); });
    });
  }
}

// out[r] += row_factor[r] * (left_a right_a)[r] + (left_b right_b)[r], summed over `tokens` tokens.
//
// Sum a tile's product from zero, then add it: accumulating in the output has four times the error.
template <class T, Order kOrder>
void accumulate(float* out, int width, int rows, int tokens, const Tile<T>& left_a, const float* right_a,
                const float* row_factor, const Tile<T>* left_b, const float* right_b) {
  constexpr bool kByRow = kOrder == Order::rows;
  constexpr int kRow = kByRow ? kTile / T::kPair : 1, kWord = kByRow ? 1 : kTile;  // strides in words
  const auto words_of = [](const Tile<T>& tile) { return kByRow || T::kPair == 1 ? tile.by_row : tile.by_column; };
  const int words = (tokens + T::kPair - 1) / T::kPair;
  for_column_groups(0, width / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    for_row_groups<kColumns>(0, rows, [&](auto group, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(group)::value;
      Vf acc[kRows][kColumns] = {};
      multiply<T, kRows, kColumns, kRow, kWord>(acc, words_of(left_a) + r0 * kRow, right_a + v0 * kLanes, width, words);
      if (row_factor != nullptr) {
        for_each_vector(acc, [&](Vf& x, int r, int) CRATE_LAMBDA { x *= row_factor[r0 + r]; });
      }
      if (left_b != nullptr) {
        multiply<T, kRows, kColumns, kRow, kWord>(acc, words_of(*left_b) + r0 * kRow, right_b + v0 * kLanes, width,
                                                  words);
      }
      for_each_vector(acc, [&](Vf& x, int r, int v) CRATE_LAMBDA {
        float* const p = out + (r0 + r) * static_cast<int64_t>(width) + (v0 + v) * kLanes;
        store(p, load(p) + x);
      });
    });
  });
}

}  // namespace
