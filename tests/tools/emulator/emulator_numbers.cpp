// The functions of emulator_numbers.h.
#include "emulator_numbers.h"

#include <cstring>

#pragma GCC optimize("O3")
#ifdef __x86_64__
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif
#define INLINE __attribute__((always_inline)) inline

namespace emulator {

FAST void take_larger(uint32_t* of, const uint32_t* other, size_t count) {
  for (size_t n = 0; n < count; ++n) of[n] = of[n] < other[n] ? other[n] : of[n];
}

namespace {

// Vectors, which memory may hold anywhere. No sum of so many waits for its last addition.
typedef double Four __attribute__((vector_size(32), aligned(8), may_alias));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

template <int FOURS>
INLINE void multiply_columns(const double (*a)[256], const double (*b)[256], int row, int first, double* to) {
  Four sums[FOURS] = {};
  for (int k = 0; k < 16; ++k) {
    const Four* const of_k = reinterpret_cast<const Four*>(b[k] + first);
    for (int n = 0; n < FOURS; ++n) sums[n] += a[k][row] * of_k[n];
  }
  for (int n = 0; n < FOURS; ++n) reinterpret_cast<Four*>(to + first)[n] = sums[n];
}

typedef uint32_t EightBits __attribute__((vector_size(32), aligned(4), may_alias));

// Eight numbers of 16 bits, each of which lies in the upper half of 32.
template <bool HALF>
INLINE Eight numbers(EightBits bits) {
  if (!HALF) return reinterpret_cast<Eight&>(bits);
  // As c10::detail::fp16_ieee_to_fp32_value, which says why.
  const EightBits twice = bits + bits, usual = (twice >> 4) + (0xe0u << 23), small = twice >> 17 | 126u << 23;
  const Eight large = reinterpret_cast<const Eight&>(usual) * 0x1.0p-112f;
  const Eight subnormal = reinterpret_cast<const Eight&>(small) - 0.5f;
  const EightBits found =
      twice < (1u << 27) ? reinterpret_cast<const EightBits&>(subnormal) : reinterpret_cast<const EightBits&>(large);
  const EightBits number = (bits & 0x80000000u) | found;
  return reinterpret_cast<const Eight&>(number);
}

// Of a row of pairs, the first numbers and the second ones.
template <bool HALF, int ROWS>
INLINE void unpack(const uint32_t (&pairs)[ROWS][8], float (&to)[ROWS][2][8]) {
  for (int row = 0; row < ROWS; ++row) {
    const EightBits bits = reinterpret_cast<const EightBits&>(pairs[row]);
    reinterpret_cast<Eight&>(to[row][0]) = numbers<HALF>(bits << 16);
    reinterpret_cast<Eight&>(to[row][1]) = numbers<HALF>(bits & 0xffff0000u);
  }
}

template <bool HALF>
INLINE void multiply(const uint32_t (&a)[16][8], const uint32_t (&b)[8][8], float (&d)[16][8]) {
  float left[16][2][8], columns[8][2][8], right[16][8];
  unpack<HALF>(a, left);
  unpack<HALF>(b, columns);
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 8; ++n) right[k][n] = columns[n][k % 2][k / 2];
  }
  for (int first = 0; first < 16; first += 8) {
    Eight* const rows = reinterpret_cast<Eight*>(d[first]);
    Eight sums[8];
    for (int row = 0; row < 8; ++row) sums[row] = rows[row];
    for (int k = 0; k < 16; ++k) {
      const Eight of_k = *reinterpret_cast<const Eight*>(right[k]);
      for (int row = 0; row < 8; ++row) sums[row] += left[first + row][k % 2][k / 2] * of_k;
    }
    for (int row = 0; row < 8; ++row) rows[row] = sums[row];
  }
}

}  // namespace

FAST void multiply_row(const double (*a)[256], const double (*b)[256], int row, int columns, double* sums) {
  int first = 0;
  for (; first + 32 <= columns; first += 32) multiply_columns<8>(a, b, row, first, sums);
  for (; first < columns; first += 8) multiply_columns<2>(a, b, row, first, sums);
}

FAST void multiply_tile(const uint32_t (&a)[16][8], const uint32_t (&b)[8][8], float (&d)[16][8], bool half) {
  half ? multiply<true>(a, b, d) : multiply<false>(a, b, d);
}

}  // namespace emulator
