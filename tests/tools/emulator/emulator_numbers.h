// Arithmetic of the emulator that takes most of its time, compiled for several processors.
#pragma once

#include <cstddef>
#include <cstdint>

#include <torch/headeronly/util/Half.h>

#include "emulator.h"

namespace emulator {

// Each element becomes the larger of two.
void take_larger(uint32_t* of, const uint32_t* other, size_t count);

// Row `row` of A B, with A as a[k][row] and B as b[k][column].
void multiply_row(const double (*a)[256], const double (*b)[256], int row, int columns, double* sums);

// D += A B, of pairs of 16 bits: a row of A, and a column of B, has eight.
void multiply_tile(const uint32_t (&a)[16][8], const uint32_t (&b)[8][8], float (&d)[16][8], bool half);

// 16 bits as fp16 or as bf16.
inline float to_number(uint16_t bits, bool half) {
  return half ? c10::detail::fp16_ieee_to_fp32_value(bits) : bits_of<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace emulator
