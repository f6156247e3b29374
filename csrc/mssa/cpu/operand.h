// Packed operands of the tile products, and the micro-kernel.
//
// Operands are packed as 32-bit words: one float, or two bf16 neighbours along the summed index. One
// multiply-accumulate takes one word per lane. Nothing else differs between the two.
#pragma once

#include "../../common/cpu/convert.h"
#include "../../common/cpu/transpose.h"

namespace {

constexpr int kTile = 64;  // tokens per tile: four AVX-512 vectors
static_assert(kTile % kLanes == 0, "a tile is whole vectors");

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct Float32 {
  static constexpr int kPair = 1;         // elements per word
  static constexpr bool kMatrix = false;  // multiplied by tiles: matrix.h
  struct Registers {};                    // what a thread holds to multiply
  static CRATE_INLINE Vf broadcast(const float* word) { return splat(*word); }
  static CRATE_INLINE Vf dot(Vf acc, Vf a, Vf b) { return multiply_add(acc, a, b); }
  // A row of `words` words from floats.
  static CRATE_INLINE void pack(const float* in, int words, float* out) { memcpy(out, in, words * sizeof(float)); }
  // Word n holds (even[n], odd[n]).
  static CRATE_INLINE void interleave(const float* even, const float*, int words, float* out) {
    memcpy(out, even, words * sizeof(float));
  }
};

#if CRATE_BF16_DOT
struct BFloat16 {
  static constexpr int kPair = 2;
  static constexpr bool kMatrix = false;
  struct Registers {};
  static CRATE_INLINE Vf broadcast(const float* word) {
    int32_t bits;
    memcpy(&bits, word, 4);
    return as_float(splat(bits));
  }
  static CRATE_INLINE Vf dot(Vf acc, Vf a, Vf b) { return (Vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
  // To nearest, as 16 bits in the low half of each lane.
  static CRATE_INLINE Vi low(Vf v) { return (Vi)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); }
  // Rounds two rows in place, writes kLanes numbers of each to `even_row` and `odd_row`, and returns the words of
  // neighbours (even, odd).
  static CRATE_INLINE Vf round_pair(Vf& even, Vf& odd, float* even_row, float* odd_row) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(even_row), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd_row), _mm512_extracti64x4_epi64(both, 1));
    typedef int16_t Places __attribute__((vector_size(64)));
    Places place;
    for (int n = 0; n < 2 * kLanes; ++n) place[n] = static_cast<int16_t>(n / 2 + n % 2 * kLanes);
    const Vi words = (Vi)_mm512_permutexvar_epi16((__m512i)place, both);
    even = as_float(words << 16);
    odd = as_float(words & splat(static_cast<int32_t>(0xffff0000u)));
    return as_float(words);
  }
  static CRATE_INLINE void pack(const float* in, int words, float* out) {
    for (int n = 0; n < words; n += kLanes) {
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(in + 2 * n + kLanes), (__m512)load(in + 2 * n));
      memcpy(out + n, &both, sizeof both);
    }
  }
  static CRATE_INLINE void interleave(const float* even, const float* odd, int words, float* out) {
    for (int n = 0; n < words; n += kLanes) {
      store(out + n, as_float(low(load(even + n)) | (low(load(odd + n)) << 16)));
    }
  }
};
#endif

// Words of a head's channels, and rows of a panel, rounded up to whole transposed blocks.
template <class T>
constexpr int channel_words(int head_dim) {
  return (head_dim + T::kPair - 1) / T::kPair;
}
template <class T>
constexpr int64_t panel_size(int head_dim) {
  return round_up(channel_words<T>(head_dim), kLanes) * kTile * (T::kMatrix ? 2 : 1);
}
// Behind the panel, T::kMatrix has the tokens in lines, side by side.
CRATE_INLINE int64_t line_words(int words) {
  return round_up(words, kLanes);
}
CRATE_INLINE int64_t lines_at(int words) {
  return line_words(words) * kTile;
}

CRATE_INLINE int padded_dim(int head_dim) {
  return static_cast<int>(round_up(head_dim, kLanes));
}

// Packs the first `count` of kTile rows of floats, `stride` apart, as a panel: word k of token j at panel[k * kTile +
// j]. Channels beyond head_dim are zero. Whole vectors of tokens are packed, for T::kMatrix in lines too.
template <class T>
void pack_panel(const float* rows, int64_t stride, int head_dim, int count, float* panel) {
  const int words = static_cast<int>(round_up(channel_words<T>(head_dim), kLanes));
  alignas(64) float packed[kLanes][256];
  for (int j = 0; j < count; j += kLanes) {
    const float* source = rows + j * stride;
    int64_t source_stride = stride;
    if (T::kPair == 2) {
      for (int r = 0; r < kLanes; ++r) {
        T::pack(source + r * stride, words, packed[r]);
        if (T::kMatrix) memcpy(panel + lines_at(words) + (j + r) * words, packed[r], words * sizeof(float));
      }
      source = packed[0];
      source_stride = 256;
    }
    for (int k = 0; k < words; k += kLanes) {
      transpose_block(source + k, source_stride, panel + k * kTile + j, kTile);
    }
  }
}

// Packs `count` rows of `width` floats as the right operand of a sum over tokens: token j, channel d in word (j /
// kPair) * width + d. For T::kMatrix, zeros follow to whole registers.
template <class T>
void pack_rows(const float* rows, int64_t stride, int width, int count, float* out) {
  for (int j = 0; j < count; j += T::kPair) {
    T::interleave(rows + j * stride, rows + (j + T::kPair - 1) * stride, width, out + j / T::kPair * width);
  }
  if (T::kMatrix) {
    const int64_t packed = round_up(count, 2) / 2, whole = round_up(count, 2 * kLanes) / 2;
    memset(out + packed * width, 0, (whole - packed) * width * sizeof(float));
  }
}

template <int N>
struct Int {
  static constexpr int value = N;
};

// Calls body(vector, r, v) for every vector of a micro-kernel.
template <int kRows, int kColumns, class Body>
CRATE_INLINE void for_each_vector(Vf (&vectors)[kRows][kColumns], const Body& body) {
#pragma GCC unroll 4
  for (int v = 0; v < kColumns; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) body(vectors[r][v], r, v);
  }
}

// Words that a sum over channels adds up in one go: longer sums are made of such parts. Rounding each of 256 terms into
// one total errs 2 to 5 times as much as eager's product does.
constexpr int kPart = 64;

// acc[r][v] += sum_k left[r * kRowStride + k * kStride] * right[k * right_stride + v * kLanes ...].
template <class T, int kRows, int kColumns, int kRowStride, int kStride>
CRATE_INLINE void multiply(Vf (&acc)[kRows][kColumns], const float* left, const float* right, int64_t right_stride,
                           int words) {
  for (int k = 0; k < words; ++k) {
    Vf b[kColumns];
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) b[v] = load(right + k * right_stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vf a = T::broadcast(left + r * kRowStride + k * kStride);
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) acc[r][v] = T::dot(acc[r][v], a, b[v]);
    }
  }
}

// Calls body(Int<whether there are more words than kPart>): separate code, so that short sums keep their registers.
template <class T, class Body>
CRATE_INLINE void by_length(int words, const Body& body) {
  if constexpr (T::kPair == 1) {
    if (words > kPart) return body(Int<1>());
  }
  body(Int<0>());
}

// multiply() of panels over the channels, in parts of kPart words if `kLong`.
template <class T, int kLong, int kRows, int kColumns>
CRATE_INLINE void multiply_channels(Vf (&acc)[kRows][kColumns], const float* left, const float* right, int words) {
  if constexpr (kLong == 0) return multiply<T, kRows, kColumns, 1, kTile>(acc, left, right, kTile, words);
  for (int k = 0; k < words; k += kPart) {
    Vf part[kRows][kColumns] = {};
    multiply<T, kRows, kColumns, 1, kTile>(part, left + k * kTile, right + k * kTile, kTile,
                                           words - k < kPart ? words - k : kPart);
    for_each_vector(acc, [&](Vf& x, int r, int v) CRATE_LAMBDA { x += part[r][v]; });
  }
}

// Rows of a micro-kernel of `columns` vectors: as many as fit the registers beside operands.
constexpr int group_rows(int columns) {
  return CRATE_LANES == 16 ? (columns == 4 ? 6 : 8) : (columns == 2 ? (CRATE_LANES == 8 ? 6 : 4) : 8);
}

// Calls body(Int<rows>, first row) until rows r .. rows - 1 are covered exactly.
template <int kColumns, class Body>
CRATE_INLINE void for_row_groups(int r, int rows, const Body& body) {
  constexpr int kMax = group_rows(kColumns);
  for (; r + kMax <= rows; r += kMax) body(Int<kMax>(), r);
  if (kMax > 4 && r + 4 <= rows) {
    body(Int<4>(), r);
    r += 4;
  }
  if (r + 2 <= rows) {
    body(Int<2>(), r);
    r += 2;
  }
  if (r < rows) body(Int<1>(), r);
}

// Calls body(Int<columns>, first vector) until vectors v .. vectors - 1 are covered, in groups as even as possible.
template <class Body>
CRATE_INLINE void for_column_groups(int v, int vectors, const Body& body) {
  while (v < vectors) {
    const int groups = (vectors - v + CRATE_MAX_COLUMNS - 1) / CRATE_MAX_COLUMNS;
    const int columns = (vectors - v + groups - 1) / groups;
    switch (columns) {
#if CRATE_MAX_COLUMNS == 4
      case 4:
        body(Int<4>(), v);
        break;
      case 3:
        body(Int<3>(), v);
        break;
#endif
      case 2:
        body(Int<2>(), v);
        break;
      default:
        body(Int<1>(), v);
    }
    v += columns;
  }
}

}  // namespace
