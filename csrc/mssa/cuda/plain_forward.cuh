// The forward of subspace attention by fp32 products: a softmax with a running maximum. phi = "threshold" takes two
// passes. The first finds maximum and sum, the second adds up the rows whose weights are above the threshold.
#pragma once

#include "plain_tile.cuh"
#include "space.cuh"

namespace crate_kernels {
namespace plain {

constexpr int64_t kForwardShared = sizeof(float) * ((kOwned + kTile) * kPitch + kOwned * kWeightPitch);

// s += rows of `own` times rows of `tile`, channel by channel.
CRATE_DEVICE void add_scores(float (&s)[kPart][kPart], const float* own, const float* tile, const Thread& t,
                             int channels) {
#pragma unroll 1
  for (int c = 0; c < channels; c += 4) {
    float a[kPart][4], b[kPart][4];
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
      load4(own + t.row_at(n) * kPitch + c, a[n]);
      load4(tile + t.column_at(n) * kPitch + c, b[n]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) s[i][j] += a[i][k] * b[j][k];
      }
    }
  }
}

// A row's softmax so far; the sum covers the thread's own columns.
struct Softmax {
  float largest = -INFINITY, sum = 0.0f;
};

// The sum over the lanes that share a row.
CRATE_DEVICE float row_sum(float v) {
#pragma unroll
  for (int step = kColumnLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

// Turns scores into weights relative to the row's largest score. Returns the factor of all earlier sums.
CRATE_DEVICE float weigh(float (&s)[kPart], Softmax& row) {
  float largest = row.largest;
#pragma unroll
  for (int j = 0; j < kPart; ++j) largest = fmaxf(largest, s[j]);
#pragma unroll
  for (int step = kColumnLanes / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  // Without a key so far, any finite base makes the weights 0 instead of NaN.
  const float base = largest == -INFINITY ? 0.0f : largest, shrink = expf(row.largest - base);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPart; ++j) sum += s[j] = expf(s[j] - base);
  row.largest = largest;
  row.sum = row.sum * shrink + sum;
  return shrink;
}

template <int CHUNKS>
__global__ void __launch_bounds__(kThreads) mssa_plain_fwd_kernel(Problem c) {
  float* const own = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const tile = own + kOwned * kPitch;                     // (kTile, kChunk)
  float* const weights = tile + kTile * kPitch;                  // (kOwned, kTile), each warp its rows

  const Place place = place_of(c);
  const Head h = head_of(c, place.head);
  // Start the longest causal rows first: if they started last, the launch would wait for them.
  const int start = (c.causal ? c.blocks - 1 - place.block : place.block) * kOwned;
  if (place.group == 0) zero_uncovered(c, c.out, c.lse, h, place.block);
  if (start >= h.length) return;

  // `before`: cached tokens, which are keys before the first new one.
  int before = 0, keys = h.length;
  if (c.held != nullptr) {
    const CacheSpace space = space_of(c.held[h.batch], c.keep, h.batch, c.seqlen, c.capacity);
    before = space.held;
    keys = space.held + space.appended;
  }
  const bool* const keep =
      c.held == nullptr && c.keep != nullptr ? c.keep + static_cast<int64_t>(h.batch) * c.seqlen : nullptr;
  const HeadRows queries_at = rows_of(c, c.w, h), keys_at = rows_of(c, c.keys, h);
  const int last = before + start + kOwned, stop = c.causal && last < keys ? last : keys;
  const int first_chunk = place.group * CHUNKS;
  const int chunks = CHUNKS == 1 ? 1 : (c.access.head_dim + kChunk - 1) / kChunk;
  const Thread t;
  Softmax row[kPart];
  float acc[CHUNKS][kPart][kColumns] = {};

  const int passes = c.select ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    if (pass == 1) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) row[i].sum = row_sum(row[i].sum);
    }
    for (int first = 0; first < stop; first += kTile) {
      // Warps whose rows are absent, or see none of these keys, only help to copy.
      const bool active =
          start + t.warp_row < h.length && (!c.causal || first < before + start + t.warp_row + kWarpRows);
      float s[kPart][kPart] = {};
      int staged = 0;
      for (; staged < chunks; ++staged) {
        __syncthreads();
        if (CHUNKS > 1 || first + pass == 0) stage<kOwned>(c, own, queries_at, start, h.length, staged * kChunk);
        stage<kTile>(c, tile, keys_at, first, keys, staged * kChunk);
        __syncthreads();
        if (!active) continue;
        float sum[kPart][kPart] = {};
        add_scores(sum, own, tile, t, channels_of(c, staged));
        add_chunk(s, sum);
      }
      --staged;

      float shrink[kPart] = {};
      if (active) {
        bool seen[kPart];
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          const int key = first + t.column_at(j);
          seen[j] = key < stop && (keep == nullptr || keep[key]);
        }
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          const int query = start + t.row_at(i);
#pragma unroll
          for (int j = 0; j < kPart; ++j) {
            const int key = first + t.column_at(j);
            const bool allowed = seen[j] && (!c.causal || key <= before + query);
            s[i][j] = allowed ? scaled(s[i][j], c.scale) : -INFINITY;
          }
          shrink[i] = 1.0f;
          if (pass == 0) {
            shrink[i] = weigh(s[i], row[i]);
          } else {
            // Compare with threshold * sum: a division could round an equal probability above the threshold.
            const float least = c.threshold * row[i].sum;
#pragma unroll
            for (int j = 0; j < kPart; ++j) s[i][j] = expf(s[i][j] - row[i].largest) > least ? 1.0f : 0.0f;
          }
        }
      }
      if (pass < passes - 1) continue;
      if (c.seed != nullptr && active) {
        const uint32_t kept = keep_bits(c, h, start + t.row, first + t.column, true);
#pragma unroll
        for (int n = 0; n < kPart * kPart; ++n) {
          if ((kept >> n & 1) == 0) s[n / kPart][n % kPart] = 0.0f;
        }
      }
      if (active) put_weights(weights, s, t);
      __syncwarp();
      const int count = stop - first < kTile ? (stop - first + 3) / 4 * 4 : kTile;
#pragma unroll
      for (int n = CHUNKS - 1; n >= 0; --n) {
        const int chunk = first_chunk + n;
        if (chunk * kChunk >= c.access.head_dim) continue;
        if (chunk != staged) {
          __syncthreads();
          stage<kTile>(c, tile, keys_at, first, keys, chunk * kChunk);
          __syncthreads();
        }
        if (!active) continue;
        float sum[kPart][kColumns] = {};
        add_weighted(sum, weights, tile, t, count);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            acc[n][i][k] = acc[n][i][k] * shrink[i] + sum[i][k];
          }
        }
      }
    }
  }

  float factor[kPart];
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    const float sum = passes == 2 ? row[i].sum : row_sum(row[i].sum);
    const bool empty = sum == 0.0f;
    const int query = start + t.row_at(i);
    factor[i] = empty ? 0.0f : c.keep_factor * (passes == 2 ? c.threshold : 1.0f / sum);
    if (c.lse != nullptr && place.group == 0 && t.column == 0 && query < h.length) {
      c.lse[number_of(c, h) + query] = empty ? -INFINITY : row[i].largest + logf(sum);
    }
  }
  write_rows(c, own, rows_of(c, c.out, h), acc, factor, t, start, h.length, first_chunk);
}

}  // namespace plain
}  // namespace crate_kernels
