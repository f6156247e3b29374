// The softmax over the heads of one token, forward and backward, by one warp.
#pragma once

#include "access.cuh"

namespace crate_kernels {

CRATE_DEVICE double largest_in_warp(double v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const double other = __shfl_xor_sync(kAllLanes, v, step);
    v = other > v || other != other ? other : v;
  }
  return v;
}

// Stores the membership, and passes it to also(h, member). Logits are fp64, one number per head: a token that dominates
// its channels has q near head_dim, and in fp32 the logits of all its heads would be alike.
template <class Also>
CRATE_DEVICE void softmax_over_heads(const TssaProblem& p, const double* logits, bool seen, const TssaRows& members,
                                     int n, Also also) {
  const int lane = threadIdx.x % kWarp;
  double largest = -HUGE_VAL;
  for (int h = lane; h < p.nheads; h += kWarp) {
    const double logit = logits[h];
    largest = logit > largest || logit != logit ? logit : largest;
  }
  largest = largest_in_warp(largest);
  float total = 0.0f;
  for (int h = lane; h < p.nheads; h += kWarp) total += expf(static_cast<float>(logits[h] - largest));
  total = warp_sum(total);
  for (int h = lane; h < p.nheads; h += kWarp) {
    // Without a key, the membership is 0, and with it out and every gradient.
    const float member = seen ? expf(static_cast<float>(logits[h] - largest)) / total : 0.0f;
    members(n, h) = member;
    also(h, member);
  }
}

// Stores dlogit from dmembers[h], which it overwrites, and passes it to also(h, dlogit). The mean is subtracted twice.
// If a head has nearly all of its token, the first difference is mostly the rounding of two large numbers. The second
// sum has small terms, and is exact enough.
template <class Also>
CRATE_DEVICE void softmax_backward(const TssaProblem& p, float* dmembers, const TssaRows& members,
                                   const TssaRows& dlogit, int n, Also also) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int time = 0; time < 2; ++time) {
    float mean = 0.0f;
    for (int h = lane; h < p.nheads; h += kWarp) mean += members(n, h) * dmembers[h];
    mean = warp_sum(mean);
    for (int h = lane; h < p.nheads; h += kWarp) dmembers[h] -= mean;
  }
  for (int h = lane; h < p.nheads; h += kWarp) {
    const float gradient = members(n, h) * dmembers[h];
    dlogit(n, h) = gradient;
    also(h, gradient);
  }
}

}  // namespace crate_kernels
