// The full form step by step, on the tokens of one block: forward. docs/tssa.md has the equations.
#pragma once

#include "heads.cuh"

namespace crate_kernels {

// Sums of w^2 and, at sums[width], the number of keys.
template <class Access>
CRATE_DEVICE void energy_sums(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaMask& key_mask,
                              int rows, float* scratch, float* sums) {
  constexpr int N = Access::kCount;
  sum_columns<N>(p, rows, scratch, sums, [&](int n, int h, int d, float (&values)[N]) {
    access.load(w, n, h, d, values);
    const float counted = enters_sums(key_mask, n);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= values[i] * counted;
  });
  if (threadIdx.x < kWarp) {
    float keys = 0.0f;
    for (int n = threadIdx.x; n < rows; n += kWarp) keys += enters_sums(key_mask, n);
    keys = warp_sum(keys);
    if (threadIdx.x == 0) sums[p.width] = keys;
  }
}

// The reciprocals of all channels' sums; of fp32 tokens alone, `rest` is there.
struct TssaReciprocals {
  float *inverse, *rest;  // (width,)

  template <class Access>
  CRATE_DEVICE void set(const Access& access, int column, float c) const {
    const TssaReciprocal of(c);
    inverse[column] = of.inverse;
    if (access.single()) rest[column] = of.rest;
  }
  template <class Access>
  CRATE_DEVICE TssaReciprocal at(const Access& access, int column) const {
    return {inverse[column], access.single() ? rest[column] : 0.0f};
  }
};

// Computes the membership of every token, one warp per token. Writes it to `members` and `stored`, which may be the
// same.
template <class Access>
CRATE_DEVICE void membership(const TssaProblem& p, const Access& access, const TssaTokens& w,
                             const TssaReciprocals& energies, bool seen, int rows, double* scratch,
                             const TssaRows& members, const TssaRows& stored) {
  constexpr int N = Access::kCount;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  double* const logits = scratch + warp * p.nheads;  // (nheads,) per warp
  for (int n = warp; n < rows; n += warps) {
    const auto ratios = [&](int h, int d, float (&values)[N]) {
      access.load(w, n, h, d, values);
#pragma unroll
      for (int i = 0; i < N; ++i)
        values[i] = energies.at(access, h * p.head_dim + d + i).ratio(access, values[i] * values[i]);
    };
    sum_channels<N, double>(p, ratios, [&](int h, double similarity) { logits[h] = p.temp[h] * similarity; });
    softmax_over_heads(p, logits, seen, members, n, [&](int h, float member) { stored(n, h) = member; });
    __syncwarp();
  }
}

// Sums of Pi w^2 and, after all channels, of Pi.
template <class Access>
CRATE_DEVICE void moment_sums(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaRows& members,
                              const TssaMask& key_mask, int rows, float* scratch, float* sums) {
  constexpr int N = Access::kCount;
  sum_columns<N>(p, rows, scratch, sums, [&](int n, int h, int d, float (&values)[N]) {
    access.load(w, n, h, d, values);
    const float weight = members(n, h) * enters_sums(key_mask, n);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= values[i] * weight;
  });
  sum_rows(p, rows, sums + p.width, [&](int n, int h) { return members(n, h) * enters_sums(key_mask, n); });
}

// A = 1 / (1 + M), times the dropout factor of the channel.
CRATE_DEVICE float channel_gate(const TssaProblem& p, float moment, int index, int h, int d) {
  const float gate = 1.0f / (1.0f + moment);
  if (p.seed == nullptr) return gate;
  return kept_by_dropout(p, index, h, 0, 1, d, 1) != 0 ? gate * p.keep_factor : 0.0f;
}

// channel_gate for N channels from d on; moment_of(h, channel) gives M.
template <int N, class Moment>
CRATE_DEVICE void channel_gates(const TssaProblem& p, int index, int h, int d, Moment moment_of, float (&gate)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = 1.0f / (1.0f + moment_of(h, d + i));
  if (p.seed == nullptr) return;
  const uint32_t kept = kept_by_dropout(p, index, h, 0, 1, d, N);
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] *= kept >> i & 1 ? p.keep_factor : 0.0f;
}

// out = -w Pi A; gate_of(h, channel, gate) gives A, once per vector and thread.
template <class Access, class Gate>
CRATE_DEVICE void write_out(const TssaProblem& p, const Access& access, const TssaTokens& w, const TssaRows& members,
                            const TssaTokens& out, int rows, Gate gate_of) {
  constexpr int N = Access::kCount;
  each_column<N>(p, [&](int h, int d, int group, int groups) {
    float gate[N];  // channels of the thread's vector
    gate_of(h, d, gate);
    constexpr int kAhead = 2;  // loads in flight, not delayed by stores
    for (int n = group; n < rows; n += kAhead * groups) {
      float x[kAhead][N];  // (kAhead tokens, N channels) per thread
#pragma unroll
      for (int r = 0; r < kAhead; ++r) access.load(w, min(n + r * groups, rows - 1), h, d, x[r]);
#pragma unroll
      for (int r = 0; r < kAhead; ++r) {
        if (n + r * groups >= rows) break;
        const float member = members(n + r * groups, h);
#pragma unroll
        for (int i = 0; i < N; ++i) x[r][i] *= -member * gate[i];
        access.store(out, n + r * groups, h, d, x[r]);
      }
    }
  });
}

}  // namespace crate_kernels
