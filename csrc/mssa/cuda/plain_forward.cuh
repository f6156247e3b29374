// The forward of subspace attention by fp32 products: a softmax with a running maximum. phi = "threshold" takes two
// passes. The first finds maximum and sum, the second adds up the rows whose weights are above the threshold.
#pragma once

#include "plain.cuh"

namespace crate_kernels::plain {

// s += rows of `own` times rows of `tile`, channel by channel.
CRATE_DEVICE void add_scores(float (&s)[kPart][kPart], const float* own, const float* tile, const Thread& t,
                             int channels) {
#pragma unroll 1
  for (int c = 0; c < channels; c += 4) {
    float a[kPart][4], b[kPart][4];  // (kPart rows, 4 channels) per thread, of own rows and of the tile's
    unroll<kPart>([&](int n) {
      load4(own + t.row_at(n) * kPitch + c, a[n]);
      load4(tile + t.column_at(n) * kPitch + c, b[n]);
    });
    unroll<4, kPart>([&](int k, int i) { unroll<kPart>([&](int j) { s[i][j] += a[i][k] * b[j][k]; }); });
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
  unroll<kPart>([&](int j) { largest = fmaxf(largest, s[j]); });
#pragma unroll
  for (int step = kColumnLanes / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  // Without a key so far, any finite base makes the weights 0 instead of NaN.
  const float base = largest == -INFINITY ? 0.0f : largest, shrink = expf(row.largest - base);
  float sum = 0.0f;
  unroll<kPart>([&](int j) { sum += s[j] = expf(s[j] - base); });
  row.largest = largest;
  row.sum = row.sum * shrink + sum;
  return shrink;
}

// The keys of a head's rows: of the same sequence, of a cache, or another range of their sequence.
template <bool APART>
CRATE_DEVICE OtherTokens keys_for(const Problem& c, const Head& h) {
  if constexpr (APART) {
    return another_range(c, h);
  } else {
    const Keys keys(c, h);
    return {keys.before, 0, keys.length, keys.key_mask, 0};
  }
}

template <int CHUNKS, bool APART = false>
__global__ void __launch_bounds__(kThreads) mssa_plain_fwd_kernel(Problem c) {
  float* const own = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const tile = own + kOwned * kPitch;                     // (kTile, kChunk)
  float* const weights = tile + kTile * kPitch;                  // (kOwned, kTile), each warp its rows

  const BlockPlace place = place_of(c);
  const Head h = head_of<APART>(c, place.head);
  const int start = first_row(c, place.block, kOwned);
  const bool measures = c.scratch.select_level != nullptr;
  if (place.group == 0 && !measures) clear_uncovered(c, h, place.block, c.outputs.out, c.outputs.lse);
  if (start >= h.length) return;

  const OtherTokens keys = keys_for<APART>(c, h);
  const HeadRows queries_at = rows_of(c, c.inputs.w, h), keys_at = rows_of(c, c.inputs.keys, h);
  const int before = keys.before + start - keys.start;  // place of the first owned row, from the first key's
  const Span seen_keys = keys_of(c.mask, {before, before + kOwned}, keys.length);
  const int first_chunk = place.group * CHUNKS;
  const int chunks = CHUNKS == 1 ? 1 : (c.access.head_dim + kChunk - 1) / kChunk;
  const Thread t;
  Softmax row[kPart];                       // of the thread's rows
  float acc[CHUNKS][kPart][kColumns] = {};  // (kOwned, CHUNKS kChunk) per block

  const int passes = c.select ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    if (pass == 1) {
      for (int i = 0; i < kPart; ++i) row[i].sum = row_sum(row[i].sum);
      if (measures) break;
    }
    const int begin = seen_keys.first / kTile * kTile;
    for (int first = begin; first < seen_keys.stop; first += kTile) {
      // Warps whose rows are absent, or see none of these keys, only help to copy.
      const Span warp_rows = {before + t.warp_row, before + t.warp_row + kWarpRows};
      const bool active = start + t.warp_row < h.length && meets(c.mask, warp_rows, {first, first + kTile});
      float s[kPart][kPart] = {};  // (kOwned, kTile) per block
      int staged = 0;
      for (; staged < chunks; ++staged) {
        __syncthreads();
        if (CHUNKS > 1 || (first == begin && pass == 0))
          stage<kOwned>(c, own, queries_at, start, h.length, staged * kChunk);
        stage<kTile>(c, tile, keys_at, first, keys.length, staged * kChunk);
        __syncthreads();
        if (!active) continue;
        float sum[kPart][kPart] = {};  // the same, of a chunk
        add_scores(sum, own, tile, t, channels_of(c, staged));
        add_sum(s, sum);
      }
      --staged;

      float shrink[kPart] = {};  // of the thread's rows
      if (active) {
        bool is_key[kPart];
        unroll<kPart>([&](int j) {
          const int key = first + t.column_at(j);
          is_key[j] = key < keys.length && (keys.key_mask == nullptr || keys.key_mask[key]);
        });
        unroll<kPart>([&](int i) {
          unroll<kPart>([&](int j) {
            const bool seen = is_key[j] && sees(c.mask, before + t.row_at(i), first + t.column_at(j));
            s[i][j] = seen ? scaled(s[i][j], c.scale) : -INFINITY;
          });
          shrink[i] = 1.0f;
          if (pass == 0) {
            shrink[i] = weigh(s[i], row[i]);
          } else {
            // Compare with threshold * sum: a division could round an equal probability above the threshold.
            const float minimum = c.threshold * row[i].sum;
            unroll<kPart>([&](int j) { s[i][j] = expf(s[i][j] - row[i].largest) > minimum ? 1.0f : 0.0f; });
          }
        });
      }
      if (pass < passes - 1) continue;
      if (c.masking.seed != nullptr && active) {
        // Places in the sequence. Without another range that is `start`: what a cache has before it draws no dropout.
        const int row = APART ? keys.start + before : start;
        const uint32_t kept = keep_bits(c, h, row + t.row, keys.start + first + t.column, true);
        unroll<kPart * kPart>([&](int n) {
          if ((kept >> n & 1) == 0) s[n / kPart][n % kPart] = 0.0f;
        });
      }
      if (active) put_weights(weights, s, t);
      __syncwarp();
      const int count = min((seen_keys.stop - first + 3) / 4 * 4, kTile);
#pragma unroll
      for (int n = CHUNKS - 1; n >= 0; --n) {
        const int chunk = first_chunk + n;
        if (chunk * kChunk >= c.access.head_dim) continue;
        if (chunk != staged) {
          __syncthreads();
          stage<kTile>(c, tile, keys_at, first, keys.length, chunk * kChunk);
          __syncthreads();
        }
        if (!active) continue;
        float sum[kPart][kColumns] = {};  // (kOwned, kChunk) per block, of a tile
        add_weighted(sum, weights, tile, t, count);
        unroll<kPart, kColumns>([&](int i, int k) { acc[n][i][k] = acc[n][i][k] * shrink[i] + sum[i][k]; });
      }
    }
  }

  if (measures) {
    unroll<kPart>([&](int i) {
      const int query = start + t.row_at(i);
      const bool writes = place.group == 0 && t.column == 0 && query < h.length;
      if (writes) put_statistics(c, h, query, row[i].largest, row[i].sum);
    });
    return;
  }
  float factor[kPart];  // of the thread's rows
  unroll<kPart>([&](int i) {
    const float sum = passes == 2 ? row[i].sum : row_sum(row[i].sum);
    const bool empty = sum == 0.0f;
    const int query = start + t.row_at(i);
    factor[i] = empty ? 0.0f : c.keep_factor * (passes == 2 ? c.threshold : 1.0f / sum);
    if (c.outputs.lse != nullptr && place.group == 0 && t.column == 0 && query < h.length) {
      c.outputs.lse[h.row + query] = mssa::lse_of(row[i].largest, sum);
    }
  });
  write_rows(c, own, rows_of(c, c.outputs.out, h, c.out_dtype), acc, factor, t, start, h.length, first_chunk);
}

}  // namespace crate_kernels::plain
