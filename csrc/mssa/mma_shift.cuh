// What the backward takes from a row once: shift = sum_d g out - dlse; mma_backward.cuh has the equations.
#pragma once

#include "mma_call.cuh"

namespace crate_kernels::mssa {

constexpr int kShiftWarps = 4;

// Writes shift of every row; a warp reads 16 rows of g and of out once. What is selected is piecewise constant: no g.
//
// The diagonal of a product as the backward makes them, not a sum in an order of its own: where a weight is near 1, out
// is near w, and g.w - shift is what remains of two numbers that cancel.
template <class T>
CRATE_DEVICE void shift_rows(const Call& call) {
  const Head head(call, blockIdx.x / call.blocks);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, r = lane / 4, t = lane % 4;
  const int row = (blockIdx.x % call.blocks * kShiftWarps + warp) * 16 + r;
  float upper[4] = {}, lower[4] = {};  // rows and columns below 8; from 8 on
  if (call.g != nullptr && !call.select) {
    const View<const T> g = head.view(static_cast<const T*>(call.g), call, call.g_strides);
    const View<const T> out = head.view(static_cast<const T*>(call.out), call, call.out_strides);
    const auto pair = [&](const View<const T>& from, int i, int channel) {
      const T* const at = from.data + i * from.row;
      uint32_t bits = 0;
      if (i >= head.length || channel >= call.access.head_dim) return bits;
      if (call.access.wide) {
        memcpy(&bits, __builtin_assume_aligned(at + channel, 4), sizeof bits);
      } else {
        bits = at[channel * from.channel].bits;
        if (channel + 1 < call.access.head_dim)
          bits |= static_cast<uint32_t>(at[(channel + 1) * from.channel].bits) << 16;
      }
      return bits;
    };
    for (int c = 2 * t; c < call.access.head_dim + 2 * t; c += 16) {
      uint32_t a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = pair(g, row + i % 2 * 8, c + i / 2 * 8);
        b[i] = pair(out, row + i % 2 * 8, c + i / 2 * 8);
      }
      const uint32_t first[2] = {b[0], b[2]}, second[2] = {b[1], b[3]};
      mma_16816<T>(upper, a, first);
      mma_16816<T>(lower, a, second);
    }
  }
  if (t != r / 2) return;
  const auto write = [&](int i, float sum) {
    if (i < head.length) call.shift[head.row + i] = call.dlse == nullptr ? sum : sum - call.dlse[head.row + i];
  };
  write(row, r % 2 == 0 ? upper[0] : upper[1]);
  write(row + 8, r % 2 == 0 ? lower[2] : lower[3]);
}

template <class T>
__global__ void __launch_bounds__(kShiftWarps * 32) mma_shift_kernel(Call call) {
  if constexpr (kTensorCores) {
    shift_rows<T>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
