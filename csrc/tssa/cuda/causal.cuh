// The causal form, forward: running sums over tokens, in chunks that are summed first.
//
// A block goes through its tokens in order. A thread has some channels of all of them and their running sums. The
// logits need all channels: threads exchange them in shared memory tile by tile. If a sequence is one chunk (short, one
// of very many, or in decoding), one launch is enough. As (read, written), in the passes and rows of full.cuh:
//
//   form    passes  rows  launches
//   alone   1, 1    0, 1  1
//   chunks  3, 1    1, 1  5
//
// Chunks add two sets of sums, 4 / (itemsize * 64) of a pass each, written twice and read three times. A step of
// decoding reads and writes the state, 2 head_dim + 1 floats per head. Later tokens change no bit of a token's output:
// every running sum is added in the order of the tokens.
#pragma once

#include "heads.cuh"
#include "shared.cuh"

namespace crate_kernels {

constexpr int kCausalTile = 8, kCausalAhead = 4;  // tokens per tile; tokens that a thread loads at once

// Calls f(vector, head, channel) for each of the thread's vectors of N channels.
template <int N, class F>
CRATE_DEVICE void each_vector(const TssaProblem& p, F f) {
  const int vectors = p.width / N, per_head = p.head_dim / N;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const int h = v / per_head;
    f(v, h, (v - h * per_head) * N);
  }
}

// Shared memory: the running sums of the block's own tokens, then a tile's terms of q, logits and membership.
struct TssaCausalShared {
  int64_t energy, moment, mass, partial, logits, members, bytes;

  CRATE_DEVICE TssaCausalShared(const TssaProblem& p, int count) {
    const int64_t vectors = p.width / count, pairs = int64_t{kCausalTile} * p.nheads;
    TssaShared s;
    energy = s.take<float>(p.width);
    moment = s.take<float>(p.width);
    mass = s.take<float>(vectors);
    partial = s.take<float>(kCausalTile * vectors);  // (kCausalTile, vectors)
    logits = s.take<double>(pairs);                  // (kCausalTile, nheads)
    members = s.take<float>(pairs);                  // (kCausalTile, nheads)
    bytes = s.bytes;
  }
};

CRATE_DEVICE float at_or_zero(const float* p, int64_t i) {
  return p == nullptr ? 0.0f : p[i];
}

// Sums before a block's first token: those of chunks, the state of a cache, or zeros.
struct TssaBefore {
  const float* sums;
  const double* state;

  CRATE_DEVICE float operator[](int64_t i) const {
    return state == nullptr ? at_or_zero(sums, i) : static_cast<float>(state[i]);
  }
};

// The sums of Pi w^2 and Pi up to a token: those of the block's own tokens, and those before.
template <int N>
struct TssaMoments {
  float before[N], sum[N], mass_before, mass;  // channels of the thread's vector; of its head

  CRATE_DEVICE void start(const TssaBefore& moments, const TssaBefore& masses, int column, int h) {
    mass_before = masses[h];
    mass = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      before[i] = moments[column + i];
      sum[i] = 0.0f;
    }
  }

  // Adds a token x to the sums and turns it into its output. A = 1 / (1 + M) without the division of M.
  CRATE_DEVICE void output(float (&x)[N], float member, float counted) {
    const float weight = member * counted;
    mass += weight;
    const float masses = mass_before + mass + kMassFloor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum[i] += x[i] * x[i] * weight;
      x[i] *= -member * (masses / (masses + (before[i] + sum[i])));
    }
  }
};

// Loads kCausalAhead tokens. The block's last token replaces those beyond it.
template <class Access>
CRATE_DEVICE void load_ahead(const Access& access, const TssaTokens& w, int first, int rows, int h, int d,
                             float (&x)[kCausalAhead][Access::kCount]) {
#pragma unroll
  for (int r = 0; r < kCausalAhead; ++r) access.load(w, min(first + r, rows - 1), h, d, x[r]);
}

// The elements of `count` tokens from the block's n-th on that dropout keeps, N bits per token.
template <int N>
CRATE_DEVICE uint32_t kept_elements(const TssaProblem& p, const TssaSpan& s, int n, int count, int h, int d) {
  return p.seed == nullptr ? 0 : kept_by_dropout(p, s.index, h, s.first + n, count, d, N);
}

template <int N>
CRATE_DEVICE void drop(const TssaProblem& p, uint32_t kept, float (&x)[N]) {
  if (p.seed == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= kept >> i & 1 ? p.keep_factor : 0.0f;
}

template <class Access>
CRATE_DEVICE void causal_energies(const TssaProblem& p, const Access& access, const TssaTokens& w,
                                  const TssaMask& key_mask, int rows, float* sums) {
  constexpr int N = Access::kCount;
  each_vector<N>(p, [&](int, int h, int d) {
    float acc[N] = {};  // channels of the thread's vector
#pragma unroll 4
    for (int n = 0; n < rows; ++n) {
      float x[N];  // (N channels,) of a token
      access.load(w, n, h, d, x);
      const float counted = enters_sums(key_mask, n);
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += x[i] * x[i] * counted;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sums[h * p.head_dim + d + i] = acc[i];
  });
  // The first head's slot takes the number of keys.
  for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) {
    float keys = 0.0f;
    for (int n = 0; n < rows && h == 0; ++n) keys += enters_sums(key_mask, n);
    sums[p.width + h] = keys;
  }
}

}  // namespace crate_kernels
