// The functions of emulator_numbers.h.
#include "emulator_numbers.h"

#include <torch/headeronly/util/Half.h>

#ifdef __x86_64__
#define FAST __attribute__((optimize("O3"), target_clones("avx2", "default")))
#else
#define FAST __attribute__((optimize("O3")))
#endif

namespace emulator {

FAST void take_larger(uint32_t* of, const uint32_t* other, size_t count) {
  for (size_t n = 0; n < count; ++n) of[n] = of[n] < other[n] ? other[n] : of[n];
}

FAST void multiply_row(const double (*a)[256], const double (*b)[256], int row, int columns, double* sums) {
  for (int first = 0; first < columns; first += 8) {
    double sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) sum[n] += a[k][row] * b[k][first + n];
    }
    for (int n = 0; n < 8; ++n) sums[first + n] = sum[n];
  }
}

FAST void multiply_tile(const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
}

float to_number(uint16_t bits, bool half) {
  if (half) return c10::detail::fp16_ieee_to_fp32_value(bits);
  return bits_of<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace emulator
