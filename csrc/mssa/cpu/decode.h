// Decoding: a few new tokens of one head against its cached ones. Memory traffic of the cache limits a step, so each
// cached row is read once for a whole group of new tokens, as key and as value.
#pragma once

#include "kernels.h"
#include "operand.h"

namespace {

using crate_kernels::MssaDecode;
using crate_kernels::MssaProblem;

constexpr int kDecodeBlock = 64;      // cached tokens per step of the walk
constexpr int kDecodeQueries = 16;    // new tokens that share a reading of the cache
constexpr float kBits = 1.44269504f;  // of a nat

// Cached tokens that are read where they lie, `stride` numbers apart, in whole vectors. The next block is fetched while
// this one is summed: from the third-level cache a step takes two thirds of its time so.
struct FloatRows {
  const float* data;
  int64_t stride;
  CRATE_INLINE Vf at(int row, int channel) const { return load(data + row * stride + channel); }
  CRATE_INLINE void fetch(int row, int channel) const { __builtin_prefetch(data + row * stride + channel); }
};
struct BFloat16Rows {
  const uint16_t* data;
  int64_t stride;
  CRATE_INLINE Vf at(int row, int channel) const { return load_bf16(data + row * stride + channel); }
  CRATE_INLINE void fetch(int row, int channel) const { __builtin_prefetch(data + row * stride + channel); }
};

// One new token, and its softmax over the keys so far. Scores are in nats: in bits the largest would be infinite.
struct DecodeQuery {
  alignas(64) float query[256], out[256];
  float largest, total;

  // The scores of kLanes rows from `first` on. Rows from `count` on are not read.
  template <class Rows>
  CRATE_INLINE Vf scores(const Rows& rows, int first, int count, int width) const {
    constexpr int kTogether = 4;
    Vf dot[kLanes] = {};
#pragma GCC unroll 4
    for (int n = 0; n < kLanes; n += kTogether) {
      int row[kTogether];
      for (int k = 0; k < kTogether; ++k) row[k] = first + n + k < count ? first + n + k : first;
      for (int c = 0; c < width; c += kLanes) {
        const Vf q = load(query + c);
#pragma GCC unroll 4
        for (int k = 0; k < kTogether; ++k) dot[n + k] += q * rows.at(row[k], c);
      }
    }
    return sums(dot);
  }
  // Attend to the first `count` of `rows`.
  template <class Rows>
  CRATE_INLINE void attend(const Rows& rows, int count, int width, float scale) {
    constexpr int kVectors = kDecodeBlock / kLanes;
    alignas(64) float weights[kDecodeBlock];
    Vf x[kVectors + 1], maximum = splat(largest);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const int first = v * kLanes;
      x[v] = splat(-INFINITY);
      if (first < count) x[v] = select(iota() < count - first, scale * scores(rows, first, count, width), x[v]);
      maximum = max(maximum, x[v]);
    }
    const float before = largest;
    largest = max(maximum);
    for (int v = 0; v < kVectors; ++v) x[v] = (x[v] - largest) * kBits;
    x[kVectors] = splat((before - largest) * kBits);
    exp2(x);
    const float rescale = x[kVectors][0];
    Vf added = {};
    for (int v = 0; v < kVectors; ++v) {
      added += x[v];
      store(weights + v * kLanes, x[v]);
    }
    total = total * rescale + sum(added);
    for_column_groups(0, width / kLanes, [&](auto columns, int first) CRATE_LAMBDA {
      constexpr int kCount = columns.value;  // gcc 16 takes no parameter of a lambda for the type of another's
      Vf even[kCount] = {}, odd[kCount] = {};
      const auto add = [&](Vf(&acc)[kCount], int row) CRATE_LAMBDA {
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v) {
          acc[v] += weights[row] * rows.at(row, (first + v) * kLanes);
          rows.fetch(row + kDecodeBlock, (first + v) * kLanes);
        }
      };
      for (int row = 0; row + 1 < count; row += 2) {
        add(even, row);
        add(odd, row + 1);
      }
      if (count % 2) add(even, count - 1);
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) {
        float* const channels = out + (first + v) * kLanes;
        store(channels, load(channels) * rescale + (even[v] + odd[v]));
      }
    });
  }
  // Add the result of another part of the cache. One without keys has the sum 0.
  CRATE_INLINE void add(const float* part, int width) {
    if (part[width + 1] == 0.0f) return;
    const float both = part[width] > largest ? part[width] : largest;
    const float mine = exp2f((largest - both) * kBits), theirs = exp2f((part[width] - both) * kBits);
    largest = both;
    total = total * mine + part[width + 1] * theirs;
    for (int c = 0; c < width; c += kLanes) store(out + c, load(out + c) * mine + load(part + c) * theirs);
  }
  CRATE_INLINE void save(float* part, int width) const {
    memcpy(part, out, width * sizeof(float));
    part[width] = largest;
    part[width + 1] = total;
  }
  CRATE_INLINE void finish(const MssaProblem& p, const MssaDecode& d, int64_t token) {
    const bool any = d.visible[token] > 0;
    const float inverse = any ? 1.0f / total : 0.0f;
    write_row(element(d.out, token, p.dtype), p.dtype, d.out.dim_stride, p.head_dim, out, inverse);
    if (d.lse == nullptr) return;
    // The total of a row with an infinite score is no number.
    const float lse = largest == INFINITY ? INFINITY : log2f(total) * 0.693147181f + largest;
    d.lse[token] = any ? lse : -INFINITY;
  }
  CRATE_INLINE void reset(int width) {
    memset(out, 0, width * sizeof(float));
    largest = -INFINITY;
    total = 0.0f;
  }
};

CRATE_INLINE float* partial_at(const MssaProblem& p, const MssaDecode& d, int part, int64_t token) {
  return d.partial + (part * d.new_tokens + token) * crate_kernels::mssa_decode_size(p.head_dim);
}

// New tokens first .. first + queries - 1.
CRATE_INLINE void decode_group(const MssaProblem& p, const MssaDecode& d, int64_t first, int queries, int part,
                               int parts) {
  const int width = padded_dim(p.head_dim);
  const float scale = static_cast<float>(p.scale);
  const bool whole = d.keys.dim_stride == 1 && p.head_dim == width;
  alignas(64) float staged[kDecodeBlock * 256];
  DecodeQuery state[kDecodeQueries];
  int64_t maximum = 0;
  for (int i = 0; i < queries; ++i) {
    DecodeQuery& q = state[i];
    memset(q.query, 0, width * sizeof(float));
    read_row(element(d.w, first + i, p.dtype), p.dtype, d.w.dim_stride, p.head_dim, q.query);
    q.reset(width);
    maximum = d.visible[first + i] > maximum ? d.visible[first + i] : maximum;
  }
  const int64_t begin = part * d.per_part, limit = begin + d.per_part;
  const int64_t end = parts > 1 && limit < maximum ? limit : maximum;
  for (int64_t start = begin; start < end; start += kDecodeBlock) {
    const auto attend = [&](const auto& rows) CRATE_LAMBDA {
      for (int i = 0; i < queries; ++i) {
        const int64_t seen = d.visible[first + i] < end ? d.visible[first + i] : end, left = seen - start;
        if (left > 0) state[i].attend(rows, static_cast<int>(left < kDecodeBlock ? left : kDecodeBlock), width, scale);
      }
    };
    const char* const keys = element(d.keys, start, p.dtype);
    if (whole && p.dtype == Dtype::f32) {
      attend(FloatRows{reinterpret_cast<const float*>(keys), d.keys.token_stride});
    } else if (whole && p.dtype == Dtype::bf16) {
      attend(BFloat16Rows{reinterpret_cast<const uint16_t*>(keys), d.keys.token_stride});
    } else {
      for (int n = 0; n < kDecodeBlock && start + n < end; ++n) {
        float* const row = staged + n * width;
        memset(row + p.head_dim, 0, (width - p.head_dim) * sizeof(float));
        read_row(element(d.keys, start + n, p.dtype), p.dtype, d.keys.dim_stride, p.head_dim, row);
      }
      attend(FloatRows{staged, width});
    }
  }
  for (int i = 0; i < queries; ++i) {
    if (parts > 1) {
      state[i].save(partial_at(p, d, part, first + i), width);
    } else {
      state[i].finish(p, d, first + i);
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
    for (int part = 0; part < parts; ++part) q.add(partial_at(p, d, part, token), width);
    q.finish(p, d, token);
  }
}

}  // namespace
