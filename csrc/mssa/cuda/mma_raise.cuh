// The factor that raises weights of fp16 tokens in a backward. Weights of long rows, and gradients of scores far below
// 1, would be subnormal numbers, which have few digits, and tokens multiply what rounding takes from them.
//
// Of weights P and R = 0 or keep_factor, with the largest norms |g| and |w| of a head, and its largest |dlse|,
//
//     |A_ij| <= 2 |scale| (2 keep_factor |g| |w| + |dlse|)
//
// P and A are multiplied by a power of two that leaves both below 2^14, and dw by its inverse. mma_shift.cuh has noted
// the norms: those of every 16 rows, squared, at the first of them.
#pragma once

#include "mma_tile.cuh"

namespace crate_kernels::mssa {

template <class T>
constexpr bool kRaises = std::is_same_v<T, fp16>;

constexpr int kMaxBits = 14;            // fp16 holds 2^15, and a weight is at most 1 but for the rounding of lse,
constexpr float kLargeScore = 0x1p20f;  // which is no longer small from this score on

// The factor of the block's head, in shared memory: there is no register left for it.
CRATE_DEVICE float& raise() {
  __shared__ float factor;
  return factor;
}

// Finds the factor, before the block's next barrier.
CRATE_DEVICE void find_raise(const Problem& call, const Head& head) {
  if (threadIdx.x >= kWarp) return;
  const bool noted = call.scratch.norms != nullptr;
  float dout = 0.0f, w = 0.0f;
  for (int row = 16 * static_cast<int>(threadIdx.x); noted && row < head.length; row += 16 * kWarp) {
    const float2 squares = unpack_pair<bf16>(call.scratch.norms[head.row + row]);
    dout = fmaxf(dout, squares.x), w = fmaxf(w, squares.y);
  }
  dout = warp_max(dout), w = warp_max(w);
  const float scale = fabsf(call.scale);
  const float maximum = call.keep_factor * fmaxf(1.0f, 4.0f * scale * sqrtf(dout) * sqrtf(w));
  const int exponent = static_cast<int>(__float_as_uint(maximum) >> 23) - 126;  // maximum is below 2^exponent
  const bool known = noted && scale * w < kLargeScore;
  if (threadIdx.x == 0) raise() = known ? exp2_fast(static_cast<float>(max(kMaxBits - exponent, 0))) : 1.0f;
}

}  // namespace crate_kernels::mssa
