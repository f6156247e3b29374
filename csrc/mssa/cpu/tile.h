// One 64 x 64 tile of weights, and the products with it on the left.
#pragma once

#include "ahead.h"
#include "matrix.h"

namespace {

// The weights of a tile, as left operands of both sums over tokens. With one element per word, both layouts are the
// same. With two, a word pairs neighbours along the index that the product sums.
template <class T>
struct WeightTile {
  static constexpr int kRowWords = kTile / T::kPair;
  alignas(64) float by_row[kTile * kRowWords];                         // sums over columns
  alignas(64) float by_column[T::kPair == 1 ? 1 : kTile * kRowWords];  // sums over rows

  // Rounds weights of rows r0.. and vectors v0.. in place, and stores them.
  template <int kRows, int kColumns>
  CRATE_INLINE void put(Vf (&e)[kRows][kColumns], int r0, int v0) {
    if constexpr (T::kPair == 1) {  // row by row: column by column, a forward of 197 tokens takes 1% longer
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) store(by_row + (r0 + r) * kTile + (v0 + v) * kLanes, e[r][v]);
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          float* const row = by_row + (r0 + r) * kRowWords + (v0 + v) * (kLanes / 2);
          Vf& odd = e[r + 1 < kRows ? r + 1 : r][v];  // one row alone is compiled, and never run
          const Vf words = T::round_pair(e[r][v], odd, row, row + kRowWords);
          store(by_column + (r0 + r) / 2 * kTile + (v0 + v) * kLanes, words);
        }
      }
    }
  }

  // Completes a tile whose weights have been put: a symmetric one by its columns only, and for T::kMatrix with zeros
  // along both sums, to whole registers.
  void complete(int rows, int columns, bool symmetric) {
    if (symmetric) mirror(columns);
    if constexpr (T::kMatrix) {
      const int whole_rows = round_up(rows, 2), whole_columns = round_up(columns, kLanes);
      if (whole_columns % (2 * kLanes) != 0) {
        for (int r = 0; r < rows; ++r) {
          memset(by_row + r * kRowWords + whole_columns / 2, 0, kLanes / 2 * sizeof(float));
        }
      }
      const int64_t more = round_up(rows, 2 * kLanes) - whole_rows;
      memset(by_column + whole_rows / 2 * kTile, 0, more / 2 * kTile * sizeof(float));
    }
  }

  // The columns in lines, as the left operand of matrix.h.
  CRATE_INLINE void column_lines(int rows, int columns, float* lines) const {
    for (int c = 0; c < columns; c += kLanes) {
      for (int k = 0; k < (rows + 1) / 2; k += kLanes) {
        transpose_block(by_column + k * kTile + c, kTile, lines + c * kRowWords + k, kRowWords);
      }
    }
  }

 private:
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

// The products of the channels of a tile's rows and columns: of panels, which have lines for T::kMatrix.
template <class T>
class ChannelProducts {
 public:
  CRATE_INLINE ChannelProducts(const float* left, const float* right, int words, int rows, int columns)
      : left_(left), right_(right), words_(words) {
    if constexpr (T::kMatrix) {
      const int64_t line = line_words(words);
      const AmxOperands operands = {left + lines_at(words), right, line, kTile, static_cast<int>(line / kLanes)};
      T::multiply(operands, rows, columns, products_, kTile);
    }
  }

  // Adds the products of rows r0.. and columns j0.. to acc.
  template <int kLong, int kRows, int kColumns>
  CRATE_INLINE void add(Vf (&acc)[kRows][kColumns], int r0, int j0) const {
    if constexpr (T::kMatrix) {
      for_each_vector(
          acc, [&](Vf& x, int r, int v) CRATE_LAMBDA { x += load(products_ + (r0 + r) * kTile + j0 + v * kLanes); });
    } else {
      multiply_channels<T, kLong>(acc, left_ + r0, right_ + j0, words_);
    }
  }

 private:
  const float *left_, *right_;
  const int words_;
  alignas(64) float products_[T::kMatrix ? kTile * kTile : 1];
};

// accumulate() by AMX.
template <class T, Order kOrder>
CRATE_INLINE void accumulate_tiles(float* out, int width, int rows, int tokens, const WeightTile<T>& left_a,
                                   const float* right_a, const float* row_factor, const WeightTile<T>* left_b,
                                   const float* right_b, Ahead& ahead) {
  constexpr int kWide = 2 * kLanes, kLine = WeightTile<T>::kRowWords;
  alignas(64) float lines_a[kTile * kLine], lines_b[kTile * kLine], sum_a[kTile * kWide], sum_b[kTile * kWide];
  const float *a = left_a.by_row, *b = left_b == nullptr ? nullptr : left_b->by_row;
  if constexpr (kOrder == Order::columns) {
    left_a.column_lines(tokens, rows, lines_a);
    a = lines_a;
    if (b != nullptr) left_b->column_lines(tokens, rows, lines_b);
    b = b == nullptr ? nullptr : lines_b;
  }
  const int depth = static_cast<int>(round_up(tokens, kWide) / kWide);
  for (int d = 0; d < width; d += kWide) {
    ahead.some();
    const int columns = width - d < kWide ? width - d : kWide;
    T::multiply({a, right_a + d, kLine, width, depth}, rows, columns, sum_a, kWide);
    if (b != nullptr) T::multiply({b, right_b + d, kLine, width, depth}, rows, columns, sum_b, kWide);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; c += kLanes) {
        Vf x = load(sum_a + r * kWide + c);
        if (row_factor != nullptr) x *= row_factor[r];
        if (b != nullptr) x += load(sum_b + r * kWide + c);
        float* const p = out + r * static_cast<int64_t>(width) + d + c;
        store(p, load(p) + x);
      }
    }
  }
}

// Calls of Ahead::some() in a product of whole tiles.
template <class T>
constexpr int kFetches = T::kMatrix ? 2 : kTile / 8;

// out[r] += row_factor[r] * (left_a right_a)[r] + (left_b right_b)[r], summed over `tokens` tokens. Fetches what
// `ahead` has meanwhile.
//
// Sum a tile's product from zero, then add it: accumulating in the output has four times the error.
template <class T, Order kOrder>
void accumulate(float* out, int width, int rows, int tokens, const WeightTile<T>& left_a, const float* right_a,
                const float* row_factor, const WeightTile<T>* left_b, const float* right_b, Ahead& ahead) {
  constexpr bool kByRow = kOrder == Order::rows;
  if constexpr (T::kMatrix) {
    return accumulate_tiles<T, kOrder>(out, width, rows, tokens, left_a, right_a, row_factor, left_b, right_b, ahead);
  }
  constexpr int kRow = kByRow ? kTile / T::kPair : 1, kWord = kByRow ? 1 : kTile;  // strides in words
  const auto words_of = [](const WeightTile<T>& tile) {
    return kByRow || T::kPair == 1 ? tile.by_row : tile.by_column;
  };
  const int words = (tokens + T::kPair - 1) / T::kPair;
  for_column_groups(0, width / kLanes, [&](auto columns, int v0) __attribute__((always_inline)) {
    constexpr int kColumns = decltype(columns)::value;
    for_row_groups<kColumns>(0, rows, [&](auto group, int r0) __attribute__((always_inline)) {
      constexpr int kRows = decltype(group)::value;
      ahead.some();
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
