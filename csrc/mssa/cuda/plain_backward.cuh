// The backward of subspace attention by fp32 products: one accumulator, no atomics, bitwise deterministic.
//
// Symbols as in docs/mssa.md; g is the gradient of out, L is lse and dlse its gradient. A block owns rows j of w, as
// keys and as queries at once, and walks over tiles of rows i. One tile of scores is symmetric and serves both
// directions:
//
//   P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
//   dw_j = sum_i  P_ij g_i + A_ij w_i
//   A_ij = scale (P_ij (g_i.w_j - delta_i + dlse_i) + P_ji (g_j.w_i - delta_j + dlse_j))
#pragma once

#include "plain_delta.cuh"

namespace crate_kernels {
namespace plain {

constexpr int64_t kBackwardShared = sizeof(float) * (2 * (kOwned + kTile) * kPitch + kOwned * kWeightPitch);

// L, delta and dlse of a row. An absent row has L = inf, so every weight is 0. A row without keys has L = -inf, and all
// its weights are masked.
struct Numbers {
  float lse, delta, dlse;
};

CRATE_DEVICE Numbers numbers_of(const Problem& c, const Head& h, int row) {
  if (row >= h.length) return {INFINITY, 0.0f, 0.0f};
  const int64_t n = number_of(c, h) + row;
  return {c.lse[n], c.products ? c.delta[n] : 0.0f, c.dlse != nullptr ? c.dlse[n] : 0.0f};
}

template <int CHUNKS>
__global__ void __launch_bounds__(kThreads, 2) mssa_plain_bwd_kernel(Problem c) {
  float* const own_w = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const own_g = own_w + kOwned * kPitch;
  float* const tile_w = own_g + kOwned * kPitch;  // (kTile, kChunk)
  float* const tile_g = tile_w + kTile * kPitch;
  float* const weights = tile_g + kTile * kPitch;  // (kOwned, kTile), each warp its rows

  const Place place = place_of(c);
  const Head h = head_of(c, place.head);
  const int start = place.block * kOwned, first_chunk = place.group * CHUNKS;
  const int chunks = CHUNKS == 1 ? 1 : (c.access.head_dim + kChunk - 1) / kChunk;
  if (place.group == 0) zero_uncovered(c, c.dw, nullptr, h, place.block);
  if (start >= h.length) return;
  const bool* const keep = c.keep != nullptr ? c.keep + static_cast<int64_t>(h.batch) * c.seqlen : nullptr;
  const HeadRows w_at = rows_of(c, c.w, h), g_at = rows_of(c, c.g, h);
  const Thread t;
  // With more than one chunk, the memory of the owned rows is free once the scores are known.
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

  // Without a gradient of the scores, earlier rows add nothing: owned rows are not their keys.
  for (int first = c.causal && !c.scores ? start : 0; first < h.length; first += kTile) {
    // Roles of the warp's rows for this tile. Warps without rows or without a role only help to stage.
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

    // s becomes the weights of g, gw the weights of w.
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
          // Round the products as delta's are. Add dlse after the differences, which may be small.
          const float key = __fmul_rn(factor_p, gw[a][b]) - row.delta + row.dlse;
          const float query = __fmul_rn(factor_q, wg[a][b]) - own[a].delta + own[a].dlse;
          gw[a][b] = c.scale * (p * key + q * query);
          if (c.select) p = p > c.threshold ? c.threshold : 0.0f;
          s[a][b] = p * factor_p;
        }
      }
    }

    const int count = h.length - first < kTile ? (h.length - first + 3) / 4 * 4 : kTile;
    if (CHUNKS > 1) __syncwarp();  // `second` overwrites the owned rows that the warp has read
    put_weights(weights, s, t);
    if (CHUNKS > 1) put_weights(second, gw, t);
    __syncwarp();
#pragma unroll
    for (int n = CHUNKS - 1; n >= 0; --n) {
      const int chunk = first_chunk + n;
      if (chunk * kChunk >= c.access.head_dim) continue;
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
