// Shared by the kernels of token statistics: tiles of one token per lane, and sums over their tokens and channels.
#pragma once

#include <type_traits>

#include "../../common/cpu/convert.h"
#include "../../common/cpu/philox.h"
#include "../../common/cpu/vec.h"
#include "kernels.h"

namespace {
namespace tssa {

using crate_kernels::kTssaChunk;
using crate_kernels::TssaKernel;
using crate_kernels::TssaProblem;
using crate_kernels::TssaSequence;
using crate_kernels::TssaStep;
using Floats = crate_kernels::TssaStrided<float>;
using Tokens = crate_kernels::TssaStrided<char>;

constexpr float kFullFloor = 1e-24f, kCausalFloor = 1e-12f, kMassFloor = 1e-8f;
static_assert(kTssaChunk % kLanes == 0, "a chunk is whole tiles");
constexpr int kTilesPerChunk = kTssaChunk / kLanes;

CRATE_INLINE int vectors_of(const TssaProblem& p) {
  return (p.head_dim + kLanes - 1) / kLanes;
}

// Lane n is the sum of the lanes of v[n]. Overwrites v.
CRATE_INLINE Vf sum_each(Vf (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const Vi second = (iota() & half) != 0;
#pragma GCC unroll 8
    for (int r = 0; r < half; ++r) {
      v[r] = select(second, v[r + half], v[r]) + exchange(select(second, v[r], v[r + half]), half);
    }
  }
  return v[0];
}

// The first `count` of kLanes floats; zero beyond.
CRATE_INLINE Vf load_some(const float* p, int count) {
  if (count == kLanes) return load(p);
  Vf v = {};
  memcpy(&v, p, count * sizeof(float));
  return v;
}
CRATE_INLINE void store_some(float* p, Vf v, int count) {
  if (count == kLanes) {
    store(p, v);
  } else {
    memcpy(p, &v, count * sizeof(float));
  }
}

// Vector v of token n of one head's tokens.
CRATE_INLINE float* at(const Floats& rows, int n, int v) {
  return rows.data + n * rows.token + v * kLanes;
}
CRATE_INLINE Vf get(const Floats& rows, int n, int v) {
  return load(at(rows, n, v));
}

CRATE_INLINE char* element(const Tokens& tokens, Dtype dtype, int64_t h, int64_t n, int64_t d) {
  const int64_t offset = h * tokens.head + n * tokens.token + d * tokens.channel;
  return tokens.data + offset * crate_kernels::itemsize(dtype);
}

// A tile is kLanes tokens of every head in fp32, zero beyond the last token and the last channel. It lies in the tensor
// itself if that is fp32 in whole vectors and tokens. Otherwise it is a copy.
CRATE_INLINE bool is_in_place(const TssaProblem& p, const Tokens& tokens, int count) {
  return p.dtype == Dtype::f32 && tokens.channel == 1 && p.head_dim % kLanes == 0 && count == kLanes;
}

// A tile to write to; `store_tile` ends it.
CRATE_INLINE Floats place_tile(const TssaProblem& p, const Tokens& tokens, int64_t first, int count, float* staging) {
  if (!is_in_place(p, tokens, count)) return {staging, kLanes * p.width(), p.width(), 1};
  return {reinterpret_cast<float*>(element(tokens, p.dtype, 0, first, 0)), tokens.head, tokens.token, 1};
}

constexpr int kMostAtOnce = 256;  // channels per conversion

// Says if a head's channels are whole vectors of bf16.
CRATE_INLINE bool in_bf16_vectors(const TssaProblem& p, const Tokens& tokens) {
  return p.dtype == Dtype::bf16 && tokens.channel == 1 && p.head_dim % kLanes == 0;
}

// Calls f(element, its place in the tile) for every vector of bf16 tokens.
template <class F>
CRATE_INLINE void each_bf16_vector(const TssaProblem& p, const Floats& tile, const Tokens& tokens, int64_t first,
                                   int count, const F& f) {
  for (int n = 0; n < count; ++n) {
    for (int h = 0; h < p.nheads; ++h) {
      char* const from = element(tokens, p.dtype, h, first + n, 0);
      for (int v = 0; v < vectors_of(p); ++v) f(from + v * kLanes * sizeof(uint16_t), at(tile.of_head(h), n, v));
    }
  }
}

Floats load_tile(const TssaProblem& p, const Tokens& tokens, int64_t first, int count, float* staging) {
  const Floats tile = place_tile(p, tokens, first, count, staging);
  if (is_in_place(p, tokens, count)) return tile;
  const int64_t width = p.width();
  if (in_bf16_vectors(p, tokens)) {
    each_bf16_vector(p, tile, tokens, first, count, [](const char* from, float* to) { store(to, load_bf16(from)); });
  } else {
    for (int h = 0; h < p.nheads; ++h) {
      for (int n = 0; n < count; ++n) {
        float* const row = at(tile.of_head(h), n, 0);
        for (int d = 0; d < p.head_dim; d += kMostAtOnce) {
          const int some = p.head_dim - d < kMostAtOnce ? p.head_dim - d : kMostAtOnce;
          read_row(element(tokens, p.dtype, h, first + n, d), p.dtype, tokens.channel, some, row + d);
        }
        for (int64_t d = p.head_dim; d < width; ++d) row[d] = 0.0f;
      }
    }
  }
  for (int h = 0; h < p.nheads; ++h) {
    memset(at(tile.of_head(h), count, 0), 0, (kLanes - count) * width * sizeof(float));
  }
  return tile;
}

void store_tile(const TssaProblem& p, const Floats& tile, const Tokens& tokens, int64_t first, int count) {
  if (is_in_place(p, tokens, count)) return;
  if (in_bf16_vectors(p, tokens)) {
    each_bf16_vector(p, tile, tokens, first, count, [](char* to, const float* from) { store_bf16(to, load(from)); });
    return;
  }
  for (int h = 0; h < p.nheads; ++h) {
    for (int n = 0; n < count; ++n) {
      for (int d = 0; d < p.head_dim; d += kMostAtOnce) {
        const int some = p.head_dim - d < kMostAtOnce ? p.head_dim - d : kMostAtOnce;
        write_row(element(tokens, p.dtype, h, first + n, d), p.dtype, tokens.channel, some,
                  at(tile.of_head(h), n, 0) + d);
      }
    }
  }
}

// Calls body(first token, tokens, number of the tile in its chunk) for each tile of a chunk.
template <class Body>
CRATE_INLINE void for_tiles(const TssaSequence& s, int64_t chunk, const Body& body) {
  const int64_t begin = chunk * kTssaChunk;
  const int64_t end = begin + kTssaChunk < s.seqlen ? begin + kTssaChunk : s.seqlen;
  for (int64_t first = begin; first < end; first += kLanes) {
    body(first, static_cast<int>(end - first < kLanes ? end - first : kLanes));
  }
}

// 1 for tokens that enter the sums, 0 for padded ones and beyond the last.
CRATE_INLINE Vf kept_tokens(const TssaSequence& s, int64_t first, int count) {
  Vf keep = select(iota() < count, splat(1.0f), Vf{});
  if (s.keep.data != nullptr) {
    for (int n = 0; n < count; ++n) keep[n] = *s.keep.at(0, first + n) ? 1.0f : 0.0f;
  }
  return keep;
}

// Marks the tile's tokens that have a kept token to sum over. In the full form these are all or none, in the causal
// form those from the first kept token on. Lanes beyond the last token are excluded: their q is 0, and 0 times an
// infinite temp is NaN.
CRATE_INLINE Vi has_key(const TssaSequence& s, int64_t first, int count) {
  const int64_t before = s.first_key - first;
  const Vi begun = iota() >= static_cast<int32_t>(before < 0 ? 0 : before > kLanes ? kLanes : before);
  return begun & (iota() < count);
}

// sums[d] += sum_n weight[n] w_nd^2.
CRATE_INLINE void add_squares(const Floats& w, int vectors, const float* weight, float* sums) {
  for (int v = 0; v < vectors; ++v) {
    Vf acc = load(sums + v * kLanes);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      const Vf x = get(w, n, v);
      acc += x * weight[n] * x;
    }
    store(sums + v * kLanes, acc);
  }
}

// sums[d] += sum_n weight[n] w_nd^2 / c_d; `inverse` is 1 / c. Multiply by `inverse` first: w^2 times a small weight
// underflows in channels whose c is still in range.
CRATE_INLINE void add_ratios(const Floats& w, int vectors, const float* inverse, const float* weight, float* sums) {
  for (int v = 0; v < vectors; ++v) {
    const Vf f = load(inverse + v * kLanes);
    Vf acc = load(sums + v * kLanes);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      const Vf x = get(w, n, v);
      acc += x * f * weight[n] * x;
    }
    store(sums + v * kLanes, acc);
  }
}

// Lane n: sum_d w_nd^2 factor[d].
CRATE_INLINE Vf square_dots(const Floats& w, int vectors, const float* factor) {
  Vf acc[kLanes] = {};
  for (int v = 0; v < vectors; ++v) {
    const Vf f = load(factor + v * kLanes);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      const Vf x = get(w, n, v);
      acc[n] += x * f * x;
    }
  }
  return sum_each(acc);
}

// Softmax over heads of logits (nheads, kLanes), in place; 0 for tokens that `seen` leaves out.
CRATE_INLINE void softmax_over_heads(int nheads, Vi seen, float* logits) {
  Vf largest = load(logits), total = {};
  for (int h = 1; h < nheads; ++h) largest = max(largest, load(logits + h * kLanes));
  for (int h = 0; h < nheads; ++h) {
    const Vf x = (load(logits + h * kLanes) - largest) * 1.44269504f;
    const Vf e = select(x == x, exp2(x), x);  // exp2 does not keep NaN
    total += e;
    store(logits + h * kLanes, e);
  }
  const Vf inverse = 1.0f / total;
  for (int h = 0; h < nheads; ++h) {
    store(logits + h * kLanes, select(seen, load(logits + h * kLanes) * inverse, Vf{}));
  }
}

// The gradient of the softmax over heads, (nheads, kLanes) each, in place: dlogit = Pi (dPi - sum_h Pi dPi). The mean
// is subtracted twice. If heads are nearly alike, or one has nearly all of a token, the first difference is mostly the
// rounding of two large numbers. The second sum has small terms, and is exact enough.
CRATE_INLINE void softmax_backward(int nheads, const float* membership, float* grad) {
  for (int time = 0; time < 2; ++time) {
    Vf mean = {};
    for (int h = 0; h < nheads; ++h) mean += load(membership + h * kLanes) * load(grad + h * kLanes);
    for (int h = 0; h < nheads; ++h) store(grad + h * kLanes, load(grad + h * kLanes) - mean);
  }
  for (int h = 0; h < nheads; ++h) {
    store(grad + h * kLanes, load(membership + h * kLanes) * load(grad + h * kLanes));
  }
}

// The dropout factors of one head's row, for p.width() channels.
void dropout_row(const TssaProblem& p, uint32_t head, int64_t row, float* factor) {
  alignas(64) int32_t channel[16];
  alignas(64) uint32_t word[16];
  for (int64_t d = 0; d < p.width(); d += 16) {
    for (int n = 0; n < 16; ++n) channel[n] = static_cast<int32_t>(d) + n;
    philox_word0(p.seed, channel, static_cast<uint32_t>(row), head, 16, word);
    for (int n = 0; n < 16; ++n) factor[d + n] = word[n] >= p.keep_from ? p.keep_factor : 0.0f;
  }
}

// The same for the tokens of a tile.
CRATE_INLINE void dropout_rows(const TssaProblem& p, uint32_t head, int64_t first, const Floats& factor) {
  for (int n = 0; n < kLanes; ++n) dropout_row(p, head, first + n, at(factor, n, 0));
}

// sums = parts[0] + parts[1] + ..., `size` floats each, in this order.
CRATE_INLINE void add_parts(const float* parts, int64_t count, int64_t size, float* sums) {
  memset(sums, 0, size * sizeof(float));
  for (int64_t part = 0; part < count; ++part) {
    for (int64_t i = 0; i < size; ++i) sums[i] += parts[part * size + i];
  }
}

// Memory that a thread reuses for every tile.
struct Staging {
  float *w, *grad, *out;            // tiles that need a copy
  float *members, *counted, *dots;  // (nheads, kLanes) each
  float* rest;

  Staging(const TssaProblem& p, float* memory) {
    const int64_t tile = kLanes * p.row_size(), tokens = kLanes * p.nheads;
    w = memory;
    grad = w + tile;
    out = grad + tile;
    members = out + tile;
    counted = members + tokens;
    dots = counted + tokens;
    rest = dots + tokens;
  }
  // After the tiles, for the causal backward: running sums at each tile, and the dropout factors of a tile.
  static int64_t size(const TssaProblem& p) {
    const int64_t tile = kLanes * p.row_size(), tokens = kLanes * p.nheads;
    const int64_t sums = 2 * p.row_size() + p.head_size();
    return 3 * tile + 3 * tokens + (kTilesPerChunk + 1) * sums + kLanes * p.width() + 2 * tokens + sums;
  }
};

// sums = the sum of w^2 over a chunk's kept tokens.
CRATE_INLINE void sum_squares(const TssaProblem& p, const TssaSequence& s, int64_t chunk, float* memory, float* sums) {
  const Staging staging(p, memory);
  memset(sums, 0, p.row_size() * sizeof(float));
  for_tiles(s, chunk, [&](int64_t first, int count) {
    const Floats w = load_tile(p, s.w, first, count, staging.w);
    alignas(64) float keep[kLanes];
    store(keep, kept_tokens(s, first, count));
    for (int h = 0; h < p.nheads; ++h) add_squares(w.of_head(h), vectors_of(p), keep, sums + h * p.width());
  });
}

// Loads the membership of a tile, and its part that enters the sums.
CRATE_INLINE void load_members(const TssaProblem& p, const TssaSequence& s, int64_t first, int count, Vf keep,
                               float* members, float* counted) {
  for (int h = 0; h < p.nheads; ++h) {
    const Vf pi = load_some(s.membership.at(h, first), count);
    store(members + h * kLanes, pi);
    if (counted != nullptr) store(counted + h * kLanes, pi * keep);
  }
}

}  // namespace tssa
}  // namespace
