// What a call of token statistics is about: sizes, strides, masks, and where a block's tokens are.
#pragma once

#include "../../common/cuda/philox.cuh"

namespace crate_kernels {

constexpr float kFullFloor = 1e-24f, kCausalFloor = 1e-12f, kMassFloor = 1e-8f;

// Tokens, an output or a gradient of (batch, nheads, seqlen, head_dim), or packed: strides in elements.
struct TssaTokens {
  void* data;
  int64_t batch, head, row, channel;
};

struct TssaCall {
  Dtype dtype;
  int nsequences, nheads, head_dim;
  int width;       // channels of a token, all heads together
  int seqlen;      // of every sequence, or of the longest packed one
  int nchunks;     // of a sequence; a block has one
  int chunk_size;  // tokens
  int lanes;       // of a warp that add up a head's channels: a power of two
  int64_t total;   // packed rows
  const int32_t* cu_seqlens;
  const bool* mask;
  int64_t mask_batch, mask_row;
  const int64_t* seed;
  uint64_t keep_from;  // the least Philox word that dropout keeps
  float keep_factor;
  const float* temp;
  int64_t rows_batch, rows_head;  // of what has a number a token and head
};

// The tokens of a block: `count` is the sequence's length, `first` to `last` the block's, `origin` the first packed
// row.
struct TssaSpan {
  int index, chunk, count, first, last;
  int64_t origin;

  CRATE_DEVICE int rows() const { return last - first; }
};

// Offsets are checked on the CPU only; a device clamps them to what exists.
CRATE_DEVICE int64_t packed_offset(const TssaCall& c, int index) {
  const int64_t offset = c.cu_seqlens[index];
  return offset < 0 ? 0 : offset < c.total ? offset : c.total;
}

CRATE_DEVICE TssaSpan sequence_of(const TssaCall& c, int index) {
  TssaSpan s = {index, 0, c.seqlen, 0, c.seqlen, 0};
  if (c.cu_seqlens != nullptr) {
    s.origin = packed_offset(c, index);
    const int64_t length = packed_offset(c, index + 1) - s.origin;
    s.count = static_cast<int>(length < 0 ? 0 : length < c.seqlen ? length : c.seqlen);
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

CRATE_DEVICE TssaSpan chunk_of(const TssaCall& c) {
  const int index = static_cast<int>(blockIdx.x) / c.nchunks;
  TssaSpan s = sequence_of(c, index);
  cut(s, static_cast<int>(blockIdx.x) - index * c.nchunks, c.chunk_size);
  return s;
}

// Where elements of a block's tokens are, rows counted from the block's first.
struct TssaView {
  char* data;
  int64_t start, head, row, channel;

  CRATE_DEVICE int64_t at(int n, int h, int d) const { return start + n * row + h * head + d * channel; }
};

CRATE_DEVICE TssaView view_of(const TssaTokens& t, const TssaSpan& s) {
  const int64_t start = s.index * t.batch + (s.origin + s.first) * t.row;
  return {static_cast<char*>(t.data), start, t.head, t.row, t.channel};
}

// The same of a number a token and head.
struct TssaRows {
  float* data;
  int64_t row, head;

  CRATE_DEVICE float& operator()(int n, int h) const { return data[n * row + h * head]; }
};

CRATE_DEVICE TssaRows rows_of(const TssaCall& c, const float* data, const TssaSpan& s) {
  return {const_cast<float*>(data) + s.index * c.rows_batch + s.origin + s.first, 1, c.rows_head};
}

// The factor 0 or 1 of each of a block's tokens in the sums over tokens.
struct TssaKeep {
  const bool* mask;
  int64_t row;

  CRATE_DEVICE float operator()(int n) const { return mask == nullptr || mask[n * row] ? 1.0f : 0.0f; }
};

CRATE_DEVICE TssaKeep keep_of(const TssaCall& c, const TssaSpan& s) {
  if (c.mask == nullptr) return {nullptr, 0};
  return {c.mask + s.index * c.mask_batch + s.first * c.mask_row, c.mask_row};
}

// Which of the elements (row, channel), (row, channel + 1), ... of 1 / (1 + M) dropout keeps: a bit each for `channels`
// of `rows` tokens, 32 in all at most. Rows count within the sequence, and are 0 in the full form. One loop that is not
// unrolled: ten rounds for every element of an unrolled one would be most of the code, for what is rare.
CRATE_DEVICE uint32_t kept_by_dropout(const TssaCall& c, int index, int h, int row, int rows, int channel,
                                      int channels) {
  const uint64_t seed = static_cast<uint64_t>(*c.seed);
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < rows * channels; ++i) {
    const int r = i / channels;
    const uint32_t word =
        philox_word0(seed, channel + i - r * channels, row + r, static_cast<uint32_t>(index) * c.nheads + h);
    bits |= static_cast<uint32_t>(word >= c.keep_from) << i;
  }
  return bits;
}

// max(x, floor) that lets NaN through.
CRATE_DEVICE float floored(float x, float floor) {
  return x < floor ? floor : x;
}

}  // namespace crate_kernels
