// Decoding: a few new tokens of one head against its cached ones. Memory traffic of the cache limits a step, so each
// cached row is read once for a whole group of new tokens, as key and as value.
#pragma once

#include "kernels.h"
#include "operand.h"

namespace {

using crate_kernels::MssaDecode;
using crate_kernels::MssaProblem;

constexpr int kDecodeBlock = 16;    // cached tokens per step of the walk
constexpr int kDecodeQueries = 16;  // new tokens that share a reading of the cache

// One new token, and its softmax over the keys so far. Logarithms are to base 2.
struct DecodeQuery {
  alignas(64) float query[256], out[256];
  float largest, total;

  // Attend to `count` rows of `width` floats.
  CRATE_INLINE void attend(const float* const* row, int count, int width, float factor) {
    alignas(64) float scores[kDecodeBlock];
    float block_largest = largest;
    for (int n = 0; n < kDecodeBlock; ++n) scores[n] = -INFINITY;
    for (int n = 0; n < count; ++n) {
      Vf dot = {};
      for (int c = 0; c < width; c += kLanes) dot += load(query + c) * load(row[n] + c);
      scores[n] = factor * sum(dot);
      block_largest = scores[n] > block_largest ? scores[n] : block_largest;
    }
    const float rescale = exp2f(largest - block_largest);
    largest = block_largest;
    Vf weights = {};
    for (int n = 0; n < kDecodeBlock; n += kLanes) {
      const Vf weight = exp2(load(scores + n) - largest);
      weights += weight;
      store(scores + n, weight);
    }
    total = total * rescale + sum(weights);
    for (int c = 0; c < width; c += kLanes) {
      Vf acc = load(out + c) * rescale;
      for (int n = 0; n < count; ++n) acc += load(row[n] + c) * scores[n];
      store(out + c, acc);
    }
  }
  // Add the result of another part of the cache.
  CRATE_INLINE void add(const float* part, int width) {
    const float both = part[width] > largest ? part[width] : largest;
    if (both == -INFINITY) return;
    const float mine = exp2f(largest - both), theirs = exp2f(part[width] - both);
    largest = both;
    total = total * mine + part[width + 1] * theirs;
    for (int c = 0; c < width; c += kLanes) store(out + c, load(out + c) * mine + load(part + c) * theirs);
  }
  CRATE_INLINE void leave(float* part, int width) const {
    memcpy(part, out, width * sizeof(float));
    part[width] = largest;
    part[width + 1] = total;
  }
  CRATE_INLINE void finish(const MssaProblem& p, const MssaDecode& d, int64_t token, int width) {
    const bool any = d.visible[token] > 0;
    const float inverse = any ? 1.0f / total : 0.0f;
    for (int c = 0; c < width; ++c) out[c] *= inverse;
    write_row(element(d.out, token, p.dtype), p.dtype, d.out.dim_stride, p.head_dim, out);
    if (d.lse != nullptr) d.lse[token] = any ? (log2f(total) + largest) * 0.693147181f : -INFINITY;
  }
  CRATE_INLINE void reset(int width) {
    memset(out, 0, width * sizeof(float));
    largest = -INFINITY;
    total = 0.0f;
  }
};

CRATE_INLINE float* left_by(const MssaProblem& p, const MssaDecode& d, int part, int64_t token) {
  return d.partial + (part * d.new_tokens + token) * crate_kernels::mssa_decode_size(p.head_dim);
}

// New tokens first .. first + queries - 1.
CRATE_INLINE void decode_group(const MssaProblem& p, const MssaDecode& d, int64_t first, int queries, int part,
                               int parts) {
  const int width = padded_dim(p.head_dim);
  const float factor = static_cast<float>(p.scale * 1.4426950408889634);
  // fp32 rows of whole vectors need no staging.
  const bool direct = p.dtype == Dtype::f32 && d.keys.dim_stride == 1 && p.head_dim == width;
  alignas(64) float staged[kDecodeBlock][256] = {};
  DecodeQuery state[kDecodeQueries];
  int64_t most = 0;
  for (int i = 0; i < queries; ++i) {
    DecodeQuery& q = state[i];
    memset(q.query, 0, width * sizeof(float));
    read_row(element(d.w, first + i, p.dtype), p.dtype, d.w.dim_stride, p.head_dim, q.query);
    q.reset(width);
    most = d.visible[first + i] > most ? d.visible[first + i] : most;
  }
  const int64_t begin = part * d.per_part, limit = begin + d.per_part;
  const int64_t end = parts > 1 && limit < most ? limit : most;
  for (int64_t start = begin; start < end; start += kDecodeBlock) {
    const float* row[kDecodeBlock];
    for (int n = 0; n < kDecodeBlock && start + n < end; ++n) {
      const char* const key = element(d.keys, start + n, p.dtype);
      if (!direct) read_row(key, p.dtype, d.keys.dim_stride, p.head_dim, staged[n]);
      row[n] = direct ? reinterpret_cast<const float*>(key) : staged[n];
    }
    for (int i = 0; i < queries; ++i) {
      const int64_t seen = d.visible[first + i] < end ? d.visible[first + i] : end, left = seen - start;
      if (left > 0) state[i].attend(row, static_cast<int>(left < kDecodeBlock ? left : kDecodeBlock), width, factor);
    }
  }
  for (int i = 0; i < queries; ++i) {
    if (parts > 1) {
      state[i].leave(left_by(p, d, part, first + i), width);
    } else {
      state[i].finish(p, d, first + i, width);
    }
  }
}

void mssa_decode(const MssaProblem& p, const MssaDecode& d, int part, int parts) {
  for (int64_t first = 0; first < d.new_tokens; first += kDecodeQueries) {
    const int64_t left = d.new_tokens - first;
    decode_group(p, d, first, static_cast<int>(left < kDecodeQueries ? left : kDecodeQueries), part, parts);
  }
}

void mssa_decode_combine(const MssaProblem& p, const MssaDecode& d, int parts) {
  const int width = padded_dim(p.head_dim);
  DecodeQuery q;
  for (int64_t token = 0; token < d.new_tokens; ++token) {
    q.reset(width);
    for (int part = 0; part < parts; ++part) q.add(left_by(p, d, part, token), width);
    q.finish(p, d, token, width);
  }
}

}  // namespace
