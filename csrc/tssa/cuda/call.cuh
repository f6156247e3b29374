// Sizes, strides and masks of a call of token statistics, and the places of a block's tokens.
#pragma once

#include "../../common/cuda/philox.cuh"

namespace crate_kernels {

constexpr float kFullFloor = 1e-24f, kCausalFloor = 1e-12f, kMassFloor = 1e-8f;

// A tensor (sequences, heads, tokens, channels), packed or not, or a block's part of it; strides in elements. Elements
// have type T, or the call's dtype if T is char.
template <class T>
struct TssaStrided {
  T* data;
  int64_t sequence, head, token, channel;

  CRATE_DEVICE int64_t at(int n, int h, int d) const { return n * token + h * head + d * channel; }
  CRATE_DEVICE T& operator()(int n, int h) const { return data[n * token + h * head]; }
};
using TssaTokens = TssaStrided<char>;
using TssaRows = TssaStrided<float>;  // a number per head and token
using TssaMask = TssaStrided<const uint8_t>;

// The options and sizes of a call.
struct TssaProblem {
  Dtype dtype;
  int nsequences, nheads, head_dim;
  int width;       // channels of a token, all heads together
  int seqlen;      // of every sequence, or of the longest if packed
  int nchunks;     // per sequence; a block has one
  int chunk_size;  // tokens
  int lanes;       // lanes of a warp per head, a power of two: together they sum its channels
  int sums_every;  // tokens between the sums that a walking forward saves, or its backward reads; 0: none
  int64_t total;   // packed rows
  const int32_t* cu_seqlens;
  TssaMask mask;  // null data: every token is a key; else those whose byte, of a bool tensor, is not 0
  const int64_t* seed;
  uint64_t keep_from;  // the smallest Philox word that dropout keeps
  float keep_factor;
  const float* temp;
  int64_t rows_sequence, rows_head;  // strides of TssaRows

  CRATE_DEVICE int64_t itemsize() const { return dtype == Dtype::f32 ? 4 : 2; }
};

// What a forward and a backward have in common. Null: the form, or the way to launch it, has no such tensor.
struct TssaPass {
  TssaProblem problem;
  TssaTokens w;
  float *membership, *energy, *moment;  // energy and moment by channel of every sequence: of the full form c and M
  const float* bias;                    // (nheads, bias_tokens)
  int64_t bias_tokens;
  // Of every chunk, then of the sequence; in the causal form those before every chunk. A walking forward saves sums_1.
  float *sums_1, *sums_2;
};

// The full form writes energy and moment. The causal form has the state of a cache, with `state_mass` by head: the sums
// before the first token. A block that has a whole sequence advances them, else the scans over chunks do; the lengths,
// only the former. The sums are of w^2 and keys; of Pi w^2 and Pi.
struct TssaForward : TssaPass {
  TssaTokens out;
  double *state_energy, *state_moment, *state_mass;
  int32_t* lengths;
};

// The sums are, in the full form: of g w Pi and Pi; of dlogit w^2 / c. Causal, before or behind every chunk: of Pi w^2,
// w^2 and Pi (2 width + nheads); of dM / s and V; of dc / temp and dtemp. Of walking kernels: sums_1, of Pi w^2, Pi and
// w^2 before each step of each sequence but its first, as the forward saved them or as they are found first.
struct TssaBackward : TssaPass {
  TssaTokens dout, dw;
  const float* dmembership;
  float* dtemp;   // (nsequences, nheads)
  float* dlogit;  // per head and token; in the full form first sum_d g w A
  float* sums_3;
};

// The tokens of a block. `count`: length of the sequence. `first` to `last`: the block's tokens. `origin`: the first
// packed row.
struct TssaSpan {
  int index, chunk, count, first, last;
  int64_t origin;

  CRATE_DEVICE int rows() const { return last - first; }
};

// Offsets are checked on the CPU only; kernels clamp them to the existing rows.
CRATE_DEVICE int64_t packed_offset(const TssaProblem& p, int index) {
  const int64_t offset = p.cu_seqlens[index];
  return offset < 0 ? 0 : offset < p.total ? offset : p.total;
}

CRATE_DEVICE TssaSpan sequence_of(const TssaProblem& p, int index) {
  TssaSpan s = {index, 0, p.seqlen, 0, p.seqlen, 0};
  if (p.cu_seqlens != nullptr) {
    s.origin = packed_offset(p, index);
    const int64_t length = packed_offset(p, index + 1) - s.origin;
    s.count = static_cast<int>(length < 0 ? 0 : length < p.seqlen ? length : p.seqlen);
  }
  s.last = s.count;
  return s;
}

CRATE_DEVICE void cut(TssaSpan& s, int chunk, int chunk_size) {
  const int64_t first = static_cast<int64_t>(chunk) * chunk_size;
  s.chunk = chunk;
  s.first = static_cast<int>(first < s.count ? first : s.count);
  s.last = static_cast<int>(first + chunk_size < s.count ? first + chunk_size : s.count);
}

CRATE_DEVICE TssaSpan chunk_of(const TssaProblem& p) {
  const int index = static_cast<int>(blockIdx.x) / p.nchunks;
  TssaSpan s = sequence_of(p, index);
  cut(s, static_cast<int>(blockIdx.x) - index * p.nchunks, p.chunk_size);
  return s;
}

// A block's part; tokens are counted from the block's first.
CRATE_DEVICE TssaTokens part_of(const TssaProblem& p, const TssaTokens& t, const TssaSpan& s) {
  const int64_t first = s.index * t.sequence + (s.origin + s.first) * t.token;
  return {t.data + first * p.itemsize(), 0, t.head, t.token, t.channel};
}

CRATE_DEVICE TssaRows rows_of(const TssaProblem& p, const float* data, const TssaSpan& s) {
  return {const_cast<float*>(data) + s.index * p.rows_sequence + s.origin + s.first, 0, p.rows_head, 1, 0};
}

CRATE_DEVICE TssaRows optional_rows_of(const TssaProblem& p, const float* data, const TssaSpan& s) {
  return data == nullptr ? TssaRows{} : rows_of(p, data, s);
}

CRATE_DEVICE TssaMask key_mask_of(const TssaProblem& p, const TssaSpan& s) {
  if (p.mask.data == nullptr) return {};
  return {p.mask.data + s.index * p.mask.sequence + s.first * p.mask.token, 0, 0, p.mask.token, 0};
}

// A token's factor, 0 or 1, in the sums over tokens.
CRATE_DEVICE float enters_sums(const TssaMask& key_mask, int n) {
  return key_mask.data == nullptr || key_mask(n, 0) ? 1.0f : 0.0f;
}

// The elements (row, channel), (row, channel + 1), ... of 1 / (1 + M) that dropout keeps: one bit each for `channels`
// of `rows` tokens, at most 32 in all. Rows count within the sequence, and are 0 in the full form. Not unrolled: ten
// rounds per element would be most of the code, and dropout is rare.
CRATE_DEVICE uint32_t kept_by_dropout(const TssaProblem& p, int index, int h, int row, int rows, int channel,
                                      int channels) {
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < rows * channels; ++i) {
    const int r = i / channels;
    const uint32_t word =
        philox_word0(seed, channel + i - r * channels, row + r, static_cast<uint32_t>(index) * p.nheads + h);
    bits |= static_cast<uint32_t>(word >= p.keep_from) << i;
  }
  return bits;
}

// max(x, floor), or NaN for NaN.
CRATE_DEVICE float floored(float x, float floor) {
  return x < floor ? floor : x;
}

}  // namespace crate_kernels
