// The backward of subspace attention by fp32 products: one accumulator, no atomics, the same bits every time.
//
// MATH.md's symbols; g is the gradient of out, L is lse and shift = delta - dlse. A block owns rows j of w, as keys and
// as queries at once, and walks over tiles of rows i. One tile of scores, which is symmetric, has both directions in
// it:
//
//   P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
//   dw_j = sum_i  P_ij g_i + A_ij w_i,            A_ij = scale (P_ij (g_i.w_j - shift_i) + P_ji (g_j.w_i - shift_j))
#pragma once

#include "plain_tile.cuh"

namespace crate_kernels {
namespace plain {

constexpr int64_t kShiftShared = sizeof(float) * 2 * kOwned * kPitch;

constexpr int64_t kBackwardShared = sizeof(float) * (2 * (kOwned + kTile) * kPitch + kOwned * kWeightPitch);

// Write shift = sum_d g out - dlse of kOwned rows. A thread adds a row up channel by channel, as the products of the
// main kernel are: where a weight is near 1, out is near w, and g.w - delta is what remains of two numbers that cancel.
__global__ void __launch_bounds__(kThreads) mssa_plain_shift_kernel(Call c) {
  float* const g = reinterpret_cast<float*>(shared_memory());
  float* const out = g + kOwned * kPitch;
  const Head h = head_of(c, blockIdx.x / c.blocks);
  const int start = blockIdx.x % c.blocks * kOwned, row = start + static_cast<int>(threadIdx.x);
  if (start >= h.length) return;
  float delta = 0.0f;
  if (c.products) {
    const HeadRows g_at = rows_of(c, c.g, h), out_at = rows_of(c, c.out, h);
    for (int chunk = 0; chunk * kChunk < c.head_dim; ++chunk) {
      __syncthreads();
      stage<kOwned>(c, g, g_at, start, h.length, chunk * kChunk);
      stage<kOwned>(c, out, out_at, start, h.length, chunk * kChunk);
      __syncthreads();
      if (threadIdx.x >= kOwned) continue;
      const int channels = channels_of(c, chunk);
      for (int d = 0; d < channels; d += 4) {
        float a[4], b[4];
        load4(g + threadIdx.x * kPitch + d, a);
        load4(out + threadIdx.x * kPitch + d, b);
#pragma unroll
        for (int k = 0; k < 4; ++k) delta += a[k] * b[k];
      }
    }
  }
  if (threadIdx.x >= kOwned || row >= h.length) return;
  const int64_t number = number_of(c, h) + row;
  c.shift[number] = c.dlse != nullptr ? delta - c.dlse[number] : delta;
}

// s += w_j.w_i, as_key += w_j.g_i where KEY, as_query += g_j.w_i where QUERY; owned rows j, rows i of the tile.
template <bool KEY, bool QUERY>
CRATE_DEVICE void add_products(float (&s)[kPart][kPart], float (&as_key)[kPart][kPart], float (&as_query)[kPart][kPart],
                               const float* own_w, const float* own_g, const float* tile_w, const float* tile_g,
                               const Thread& t, int channels) {
#pragma unroll 1
  for (int c = 0; c < channels; c += 4) {
    float w[kPart][4], g[kPart][4], wi[kPart][4];
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
      load4(own_w + t.row_at(n) * kPitch + c, w[n]);
      if (QUERY) load4(own_g + t.row_at(n) * kPitch + c, g[n]);
      load4(tile_w + t.column_at(n) * kPitch + c, wi[n]);
    }
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      float gi[4] = {};
      if (KEY) load4(tile_g + t.column_at(j) * kPitch + c, gi);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          s[i][j] += w[i][k] * wi[j][k];
          if (KEY) as_key[i][j] += w[i][k] * gi[k];
          if (QUERY) as_query[i][j] += g[i][k] * wi[j][k];
        }
      }
    }
  }
}

// L and shift of a row; L is inf, and every weight then 0, where the row is absent. A row without keys, whose L is
// -inf, has all its weights masked.
struct Numbers {
  float lse, shift;
};

CRATE_DEVICE Numbers numbers_of(const Call& c, const Head& h, int row) {
  if (row >= h.length) return {INFINITY, 0.0f};
  const int64_t n = number_of(c, h) + row;
  return {c.lse[n], c.scores ? c.shift[n] : 0.0f};
}

template <int CHUNKS>
__global__ void __launch_bounds__(kThreads, 2) mssa_plain_bwd_kernel(Call c) {
  float* const own_w = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const own_g = own_w + kOwned * kPitch;
  float* const tile_w = own_g + kOwned * kPitch;  // (kTile, kChunk)
  float* const tile_g = tile_w + kTile * kPitch;
  float* const weights = tile_g + kTile * kPitch;  // (kOwned, kTile), each warp its rows

  const Place place = place_of(c);
  const Head h = head_of(c, place.head);
  const int start = place.block * kOwned, first_chunk = place.group * CHUNKS;
  const int chunks = CHUNKS == 1 ? 1 : (c.head_dim + kChunk - 1) / kChunk;
  if (place.group == 0) zero_uncovered(c, c.dw, nullptr, h, place.block);
  if (start >= h.length) return;
  const bool* const keep = c.keep != nullptr ? c.keep + static_cast<int64_t>(h.batch) * c.seqlen : nullptr;
  const HeadRows w_at = rows_of(c, c.w, h), g_at = rows_of(c, c.g, h);
  const Thread t;
  // More than one chunk leaves the owned rows' places free once the scores are known.
  float* const second = CHUNKS > 1 ? own_w + t.warp_row * (kPitch - kWeightPitch) : weights;
  Numbers own[kPart];
  bool own_kept[kPart];
#pragma unroll
  for (int n = 0; n < kPart; ++n) {
    const int j = start + t.row_at(n);
    own[n] = numbers_of(c, h, j);
    own_kept[n] = j < h.length && (keep == nullptr || keep[j]);
  }
  float acc[CHUNKS][kPart][kColumns] = {};

  // Without a gradient of the scores, rows before the owned ones give nothing: these are no keys of theirs.
  for (int first = c.causal && !c.scores ? start : 0; first < h.length; first += kTile) {
    // What the rows of the warp are to these; warps whose rows are absent, or are nothing to them, only help to stage.
    const int mine = start + t.warp_row;
    const bool as_keys = mine < h.length && (!c.causal || first + kTile > mine);
    const bool as_queries = c.scores && mine < h.length && (!c.causal || first < mine + kWarpRows);
    float s[kPart][kPart] = {}, gw[kPart][kPart] = {}, wg[kPart][kPart] = {};
    int staged = 0;
    for (; staged < chunks; ++staged) {
      const int channel = staged * kChunk, channels = channels_of(c, staged);
      __syncthreads();
      if (CHUNKS > 1 || first == (c.causal && !c.scores ? start : 0)) {
        stage<kOwned>(c, own_w, w_at, start, h.length, channel);
        if (c.products) stage<kOwned>(c, own_g, g_at, start, h.length, channel);
      }
      stage<kTile>(c, tile_w, w_at, first, h.length, channel);
      if (c.values) stage<kTile>(c, tile_g, g_at, first, h.length, channel);
      __syncthreads();
      if (!as_keys && !as_queries) continue;
      float sum[kPart][kPart] = {};
      if (!c.products) {
        add_products<false, false>(sum, gw, wg, own_w, own_g, tile_w, tile_g, t, channels);
      } else if (as_keys && as_queries) {
        add_products<true, true>(sum, gw, wg, own_w, own_g, tile_w, tile_g, t, channels);
      } else if (as_keys) {
        add_products<true, false>(sum, gw, wg, own_w, own_g, tile_w, tile_g, t, channels);
      } else {
        add_products<false, true>(sum, gw, wg, own_w, own_g, tile_w, tile_g, t, channels);
      }
      add_chunk(s, sum);
    }
    --staged;

    // s becomes the weights of g, gw those of w.
    if (as_keys || as_queries) {
      const uint32_t kept_p = as_keys ? keep_bits(c, h, start + t.row, first + t.column, false) : 0;
      const uint32_t kept_q = as_queries ? keep_bits(c, h, start + t.row, first + t.column, true) : 0;
#pragma unroll
      for (int b = 0; b < kPart; ++b) {
        const int i = first + t.column_at(b);
        const Numbers row = numbers_of(c, h, i);
        const bool row_kept = i < h.length && (keep == nullptr || keep[i]);
#pragma unroll
        for (int a = 0; a < kPart; ++a) {
          const int j = start + t.row_at(a);
          const float score = scaled(s[a][b], c.scale);
          float p = own_kept[a] && (!c.causal || j <= i) ? expf(score - row.lse) : 0.0f;
          const float q = as_queries && row_kept && (!c.causal || i <= j) ? expf(score - own[a].lse) : 0.0f;
          const float factor_p = kept_p >> (kPart * a + b) & 1 ? c.keep_factor : 0.0f;
          const float factor_q = kept_q >> (kPart * a + b) & 1 ? c.keep_factor : 0.0f;
          gw[a][b] = c.scale * (p * (factor_p * gw[a][b] - row.shift) + q * (factor_q * wg[a][b] - own[a].shift));
          if (c.threshold >= 0.0f) p = p > c.threshold ? c.threshold : 0.0f;
          s[a][b] = p * factor_p;
        }
      }
    }

    const int count = h.length - first < kTile ? (h.length - first + 3) / 4 * 4 : kTile;
    if (CHUNKS > 1) __syncwarp();  // `second` is where the warp has read its owned rows
    put_weights(weights, s, t);
    if (CHUNKS > 1) put_weights(second, gw, t);
    __syncwarp();
#pragma unroll
    for (int n = CHUNKS - 1; n >= 0; --n) {
      const int chunk = first_chunk + n;
      if (chunk * kChunk >= c.head_dim) continue;
      if (chunk != staged) {
        __syncthreads();
        stage<kTile>(c, tile_w, w_at, first, h.length, chunk * kChunk);
        if (c.values) stage<kTile>(c, tile_g, g_at, first, h.length, chunk * kChunk);
        __syncthreads();
      }
      if (!as_keys && !as_queries) continue;
      float sum[kPart][kColumns] = {};
      if (c.values && as_keys) add_weighted(sum, weights, tile_g, t, count);
      if (CHUNKS == 1) {
        __syncwarp();
        put_weights(second, gw, t);
        __syncwarp();
      }
      if (c.scores) add_weighted(sum, second, tile_w, t, count);
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) acc[n][i][k] += sum[i][k];
      }
    }
  }

  const float one[kPart] = {1.0f, 1.0f, 1.0f, 1.0f};
  write_rows(c, own_w, rows_of(c, c.dw, h), acc, one, t, start, h.length, first_chunk);
}

}  // namespace plain
}  // namespace crate_kernels
