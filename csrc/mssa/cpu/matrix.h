// Products of bf16 matrices by AMX: 16 x 16 sums of float32 in each of eight registers.
//
// A left operand is read in lines: a row's words side by side. A right operand is read as panels and packed rows are: a
// row of 16 words for one word of the sum. Both are whole registers of 16 x 16 words; what is beyond the matrix is
// finite on the side of the result, and zero along the sum.
#pragma once

#include "operand.h"

namespace {

struct AmxOperands {
  const float *left, *right;
  int64_t left_stride, right_stride;  // words from one row to the next
  int depth;                          // registers along the sum
};

#if CRATE_AMX

// Gives the eight registers of this thread their shape, and the power back after use.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// out[16 kRows][16 kColumns] = left right. The intrinsics that read do not say so to the compiler: hence the barrier.
template <int kRows, int kColumns>
CRATE_INLINE void multiply_registers(const AmxOperands& f, float* out, int64_t out_stride) {
  const int64_t left_bytes = f.left_stride * 4, right_bytes = f.right_stride * 4, out_bytes = out_stride * 4;
  asm volatile("" : : : "memory");
  _tile_zero(0);
  if (kColumns == 2) _tile_zero(1);
  if (kRows == 2) _tile_zero(2);
  if (kRows == 2 && kColumns == 2) _tile_zero(3);
  for (int k = 0; k < f.depth; ++k) {
    const float* const left = f.left + k * 16;
    const float* const right = f.right + k * 16 * f.right_stride;
    _tile_loadd(4, left, left_bytes);
    _tile_loadd(6, right, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kColumns == 2) {
      _tile_loadd(7, right + 16, right_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kRows == 2) {
      _tile_loadd(5, left + 16 * f.left_stride, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_bytes);
  if (kColumns == 2) _tile_stored(1, out + 16, out_bytes);
  if (kRows == 2) _tile_stored(2, out + 16 * out_stride, out_bytes);
  if (kRows == 2 && kColumns == 2) _tile_stored(3, out + 16 * out_stride + 16, out_bytes);
  asm volatile("" : : : "memory");
}

// Words of `BFloat16`, multiplied by AMX.
struct BFloat16Tiles : BFloat16 {
  static constexpr bool kMatrix = true;
  using Registers = TileRegisters;

  // out = left right, in whole registers that cover rows x columns.
  static CRATE_INLINE void multiply(const AmxOperands& f, int rows, int columns, float* out, int64_t out_stride) {
    for (int r = 0; r < rows; r += 32) {
      for (int c = 0; c < columns; c += 32) {
        const AmxOperands part = {f.left + r * f.left_stride, f.right + c, f.left_stride, f.right_stride, f.depth};
        float* const to = out + r * out_stride + c;
        const bool two_rows = rows - r > 16, two_columns = columns - c > 16;
        if (two_rows && two_columns) {
          multiply_registers<2, 2>(part, to, out_stride);
        } else if (two_rows) {
          multiply_registers<2, 1>(part, to, out_stride);
        } else if (two_columns) {
          multiply_registers<1, 2>(part, to, out_stride);
        } else {
          multiply_registers<1, 1>(part, to, out_stride);
        }
      }
    }
  }
};

#endif

}  // namespace
