// The full form step by step, on the tokens of one block: backward. docs/tssa.md has the equations.
#pragma once

#include "full_steps.cuh"

namespace crate_kernels {

// Sums of g w Pi, which are -dA / r, and, behind all channels, of Pi.
template <class Access>
CRATE_DEVICE void product_sums(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaTokens& dout,
                               const TssaRows& members, const TssaMask& key_mask, int rows, float* scratch,
                               float* sums) {
  constexpr int N = Access::kCount;
  sum_columns<N>(p, rows, scratch, sums, [&](int n, int h, int d, float (&values)[N]) {
    float g[N];  // (N channels,) of a token
    access.load(w, n, h, d, values);
    access.load(dout, n, h, d, g);
    const float member = members(n, h);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= g[i] * member;
  });
  sum_rows(p, rows, sums + p.width, [&](int n, int h) { return members(n, h) * enters_sums(key_mask, n); });
}

// dgate = sum_d g w A of every token and head; one warp per token.
template <class Access>
CRATE_DEVICE void through_gate(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaTokens& dout,
                               const float* gate, int rows, const TssaRows& dgate) {
  constexpr int N = Access::kCount;
  const int warps = blockDim.x / kWarp;
  for (int n = threadIdx.x / kWarp; n < rows; n += warps) {
    const auto products = [&](int h, int d, float (&values)[N]) {
      float g[N];  // (N channels,) of a token
      access.load(w, n, h, d, values);
      access.load(dout, n, h, d, g);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] *= g[i] * gate[h * p.head_dim + d + i];
    };
    sum_channels<N, float>(p, products, [&](int h, float total) { dgate(n, h) = total; });
  }
}

// dS of every head from dM of its channels; one warp per head.
template <class Moment>
CRATE_DEVICE void mass_gradient(const TssaProblem& p, const float* dmoment, float* dmass, Moment moment_of) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  for (int h = threadIdx.x / kWarp; h < p.nheads; h += warps) {
    float total = 0.0f;
    for (int d = lane; d < p.head_dim; d += kWarp) total -= dmoment[h * p.head_dim + d] * moment_of(h, d);
    total = warp_sum(total);
    if (lane == 0) dmass[h] = total;
  }
}

// The gradient of every token's logits, stored in the place of dgate. `scratch` has nheads floats per warp.
template <class Access>
CRATE_DEVICE void logit_gradient(const TssaProblem& p, const Access& access, const TssaTokens& w, const float* dmoment,
                                 const float* dmass, const TssaRows& members, const TssaRows& dmembership,
                                 const TssaMask& key_mask, int rows, float* scratch, const TssaRows& dlogit) {
  constexpr int N = Access::kCount;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  float* const dmembers = scratch + warp * p.nheads;  // (nheads,) per warp
  for (int n = warp; n < rows; n += warps) {
    const auto products = [&](int h, int d, float (&values)[N]) {
      access.load(w, n, h, d, values);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] *= values[i] * dmoment[h * p.head_dim + d + i];
    };
    sum_channels<N, float>(p, products, [&](int h, float total) { dmembers[h] = total; });
    for (int h = threadIdx.x % kWarp; h < p.nheads; h += kWarp) {
      float gradient = (dmembers[h] + dmass[h]) * enters_sums(key_mask, n) - dlogit(n, h);
      if (dmembership.data != nullptr) gradient += dmembership(n, h);
      dmembers[h] = gradient;
    }
    softmax_backward(p, dmembers, members, dlogit, n, [](int, float) {});
    __syncwarp();
  }
}

// Sums of dlogit w^2 / c: -dc c / temp of each channel. Divide by c first: w^2 times a small gradient underflows in
// channels whose c is still in range.
template <class Access>
CRATE_DEVICE void similarity_gradient_sums(const TssaProblem& p, const Access& access, const TssaTokens& w,
                                           const TssaRows& dlogit, const float* energy, int rows, float* scratch,
                                           float* sums) {
  constexpr int N = Access::kCount;
  sum_columns<N>(p, rows, scratch, sums, [&](int n, int h, int d, float (&values)[N]) {
    access.load(w, n, h, d, values);
    const float gradient = dlogit(n, h);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const TssaReciprocal c(floored(energy[h * p.head_dim + d + i], kFullFloor));
      values[i] = c.ratio(access, values[i] * values[i]) * gradient;
    }
  });
}

// dtemp of a sequence: the sums above, added up over each head's channels; one warp per head.
CRATE_DEVICE void temp_gradient(const TssaProblem& p, const float* similarity, float* dtemp) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  for (int h = threadIdx.x / kWarp; h < p.nheads; h += warps) {
    float total = 0.0f;
    for (int d = lane; d < p.head_dim; d += kWarp) total += similarity[h * p.head_dim + d];
    total = warp_sum(total);
    if (lane == 0) dtemp[h] = total;
  }
}

// The numbers of a channel that dw needs.
struct TssaSlopes {
  float gate, dmoment, twice, mean;
};

// twice = 2 temp / c, and mean = -dc c / temp. For a single token w^2 / c is 1 for every w: skip the two large terms
// that would have to cancel.
CRATE_DEVICE TssaSlopes slopes_of(const TssaProblem& p, float gate, float dmoment, float similarity, float energy,
                                  int h, int count) {
  energy = floored(energy, kFullFloor);
  const float twice = 2.0f * p.temp[h] / energy;
  const bool above = energy > kFullFloor;
  if (above && count == 1) return {gate, dmoment, 0.0f, 0.0f};
  return {gate, dmoment, twice, above ? similarity : 0.0f};
}

// dw; slopes(h, channel, of) gives the numbers of a vector's channels, once per vector and thread.
template <class Access, class Slopes>
CRATE_DEVICE void write_dw(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaTokens& dout,
                           const TssaRows& members, const TssaRows& dlogit, const TssaMask& key_mask,
                           const TssaTokens& dw, int rows, Slopes slopes) {
  constexpr int N = Access::kCount;
  each_column<N>(p, [&](int h, int d, int group, int groups) {
    TssaSlopes of[N];  // channels of the thread's vector
    slopes(h, d, of);
    for (int n = group; n < rows; n += groups) {
      float x[N], g[N];  // (N channels,) of a token
      access.load(w, n, h, d, x);
      access.load(dout, n, h, d, g);
      const float member = members(n, h), gradient = dlogit(n, h), counted = enters_sums(key_mask, n),
                  weight = 2.0f * member * counted;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float slope = weight * of[i].dmoment + (gradient - counted * of[i].mean) * of[i].twice;
        x[i] = x[i] * slope - g[i] * member * of[i].gate;
      }
      access.store(dw, n, h, d, x);
    }
  });
}

}  // namespace crate_kernels
