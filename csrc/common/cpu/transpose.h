// Transposes a block of words in registers.
#pragma once

#include "vec.h"

namespace {

// out[c][r] = in[r][c], of kLanes x kLanes words.
CRATE_INLINE void transpose_block(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if CRATE_X86_LEVELS
  Vf row[kLanes];
  for (int r = 0; r < kLanes; ++r) row[r] = load(in + r * in_stride);
  const Vi lane = iota();
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    // Exchange the off-diagonal blocks of each 2 x 2 arrangement of half x half blocks.
    const Vi second = (lane & half) != 0;
    const Vi upper = second ? lane - half + kLanes : lane;
    const Vi lower = second ? lane + kLanes : lane + half;
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      if ((r & half) == 0) {
        const Vf a = row[r], b = row[r + half];
        row[r] = shuffle(a, b, upper);
        row[r + half] = shuffle(a, b, lower);
      }
    }
  }
  for (int r = 0; r < kLanes; ++r) store(out + r * out_stride, row[r]);
#else
  for (int r = 0; r < kLanes; ++r) {
    for (int c = 0; c < kLanes; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
#endif
}

}  // namespace
