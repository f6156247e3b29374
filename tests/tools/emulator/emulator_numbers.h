// Arithmetic of the emulator that takes most of its time, compiled for several processors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

// Each element becomes the larger of two.
void take_larger(uint32_t* of, const uint32_t* other, size_t count);

// Row `row` of A B, with A as a[k][row] and B as b[k][column].
void multiply_row(const double (*a)[256], const double (*b)[256], int row, int columns, double* sums);

// D += A B.
void multiply_tile(const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]);

// 16 bits as fp16 or as bf16.
float to_number(uint16_t bits, bool half);

}  // namespace emulator
