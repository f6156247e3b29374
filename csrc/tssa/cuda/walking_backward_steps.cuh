// Steps of walking_backward.cuh: sums before and behind each group of tokens, and a thread's tokens.
#pragma once

#include "walking.cuh"

namespace crate_kernels {

// Adds a step's sums, of which `own` is the block's, to what is carried of the sequence, and stores this.
template <class S, int COUNT>
CRATE_DEVICE void keep_sums(const float* own, double* carry, float* to, bool start) {
  each_four<S, COUNT>([&](int i) {
    const float4 sum = cluster_total_4<S>(own + i), kept = carried(carry + i, sum, sum, start);
    if (cluster_rank() == 0) put_four(to + i, kept);
  });
}

// Turns the groups' sums into those of all that is before each group. `kept` is before the step: null before the first.
template <class S, int COUNT>
CRATE_DEVICE void before_groups_of(const float* own, const float* kept, float* groups) {
  const int rank = cluster_rank();
  each_four<S, COUNT>([&](int i) {
    float4 sum = kept == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : read_others_4(kept + i);
#pragma unroll
    for (int r = 0; r < S::kCluster - 1; ++r)
      if (r < rank) sum = plus(sum, cluster_read_4(own + i, r));
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const float4 next = plus(sum, four_at(groups + g * S::kSums + i));
      put_four(groups + g * S::kSums + i, sum);
      sum = next;
    }
  });
}

// before_groups of walking.cuh from the other end: what is behind each group.
template <class S, int COUNT>
CRATE_DEVICE void behind_groups(const float* own, double* carry, float* groups, bool start) {
  const int rank = cluster_rank();
  each_four<S, COUNT>([&](int i) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), behind = sum;
#pragma unroll
    for (int r = S::kCluster - 1; r >= 0; --r) {
      if (r == rank) behind = sum;
      sum = plus(sum, cluster_read_4(own + i, r));
    }
    behind = carried(carry + i, behind, sum, start);
#pragma unroll
    for (int g = S::kGroups - 1; g >= 0; --g) {
      const float4 next = plus(behind, four_at(groups + g * S::kSums + i));
      put_four(groups + g * S::kSums + i, behind);
      behind = next;
    }
  });
}

// A thread's tokens in shared memory.
template <class S>
struct TssaWalkingTokens {
  using T = typename S::T;
  uint32_t w, g;
  int w_pitch, g_pitch;
  const float *members, *key_weights;  // of the group's first token

  CRATE_DEVICE void load(int t, float (&x)[8]) const { load_vector<T>(w + t * w_pitch, x); }
  CRATE_DEVICE void load_gradient(int t, float (&x)[8]) const { load_vector<T>(g + t * g_pitch, x); }
  CRATE_DEVICE void put_gradient(int t, const float (&x)[8]) const {
    store_shared_4(g + t * g_pitch, make_uint4(pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]),
                                               pack_pair<T>(x[4], x[5]), pack_pair<T>(x[6], x[7])));
  }
  CRATE_DEVICE float member(int t) const { return members[t * S::kHeads]; }
  CRATE_DEVICE float counted(int t) const { return key_weight<S>(key_weights, t); }

  // Adds tokens `first` to `last` to sums of w^2, of Pi w^2 (WEIGHTED) and of Pi.
  template <bool WEIGHTED>
  CRATE_DEVICE void add(int first, int last, float (&sums)[8], float& mass) const {
#pragma unroll 1
    for (int t = first; t < last; ++t) add_one<WEIGHTED>(t, sums, mass);
  }
  template <bool WEIGHTED>
  CRATE_DEVICE void add_one(int t, float (&sums)[8], float& mass) const {
    float x[8];  // (8 channels,) of a token
    load(t, x);
    const float weight = WEIGHTED ? member(t) * counted(t) : counted(t), scaled = weight * kWalkScale;
    mass += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += x[i] * x[i] * scaled;
  }
};

// The part of dw that needs no softmax, in the place of dout. In fp16 it may be larger than any dw: from the first
// token whose part is, backwards, a thread keeps them smaller.
template <class S>
struct TssaWalkingParts {
  static constexpr bool kHalf = std::is_same_v<typename S::T, fp16>;
  static constexpr float kLargest = 65504.0f, kSmaller = 0x1p-10f;
  const TssaWalkingTokens<S>& tokens;
  int smaller = -1;  // the last token whose part is

  CRATE_DEVICE void put(int t, float (&x)[8]) {
    if constexpr (kHalf) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
      if (largest > kLargest) smaller = max(smaller, t);
      const float scale = t <= smaller ? kSmaller : 1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= scale;
    }
    tokens.put_gradient(t, x);
  }
  CRATE_DEVICE void load(int t, float (&x)[8]) const {
    tokens.load_gradient(t, x);
    if constexpr (kHalf) {
      const float scale = t <= smaller ? 1.0f / kSmaller : 1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= scale;
    }
  }
};

// Zeros for what dropout drops, in place.
template <class S>
CRATE_DEVICE void drop_gradients(const TssaProblem& p, const TssaSpan& s, const TssaVectorOf<S>& v,
                                 const TssaGroup<S>& own, const TssaWalkingTokens<S>& tokens) {
  if (p.seed == nullptr) return;
#pragma unroll 1
  for (int t = 0; t < own.count; ++t) {
    const uint32_t bits = kept_by_dropout(p, s.index, v.head, s.first + own.first + t, 1, v.channel, 8);
    float g[8];  // (8 channels,) of a token
    tokens.load_gradient(t, g);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = bits >> i & 1 ? g[i] : 0.0f;
    tokens.put_gradient(t, g);
  }
}

}  // namespace crate_kernels
