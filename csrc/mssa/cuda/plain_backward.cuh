// The backward of subspace attention by fp32 products: one accumulator, no atomics, bitwise deterministic.
//
// mma_backward.cuh has the equations; here delta and dlse are apart. A block owns rows j of w, as keys and as queries
// at once, and walks over tiles of rows i. One tile of scores serves both directions.
#pragma once

#include "plain_delta.cuh"

namespace crate_kernels::plain {

// L, what rounding took from it, delta and dlse of a row. An absent row has L = inf, so every weight is 0. A row
// without keys has L = -inf, and all its weights are masked. Where the forward selected, L is the largest score
// instead, and `level` the threshold times the sum of the weights.
struct Numbers {
  float lse, lse_residual, delta, dlse, level = 1.0f;
  CRATE_DEVICE float weight(float score) const { return expf(score - lse - lse_residual); }
};

template <bool APART, class Tokens>
CRATE_DEVICE Numbers numbers_of(const Problem& c, const Tokens& t, int row) {
  if (row >= t.length) return {INFINITY, 0.0f, 0.0f, 0.0f};
  const int64_t n = t.row + row;
  if (APART) return {c.key_range.lse[n], 0.0f, c.key_range.delta[n], c.key_range.dlse[n]};
  const float dlse = c.inputs.dlse != nullptr ? c.inputs.dlse[n] : 0.0f;
  if (c.scratch.select_level != nullptr) return {c.scratch.row_max[n], 0.0f, 0.0f, dlse, c.scratch.select_level[n]};
  const float lse_residual = c.scratch.lse_residual == nullptr ? 0.0f : c.scratch.lse_residual[n];
  return {c.outputs.lse[n], lse_residual, c.products ? c.scratch.delta[n] : 0.0f, dlse};
}

template <int CHUNKS, bool APART = false>
__global__ void __launch_bounds__(kThreads, 2) mssa_plain_bwd_kernel(Problem c) {
  float* const own_w = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const own_dout = own_w + kOwned * kPitch;
  float* const tile_w = own_dout + kOwned * kPitch;  // (kTile, kChunk)
  float* const tile_dout = tile_w + kTile * kPitch;
  float* const weights = tile_dout + kTile * kPitch;  // (kOwned, kTile), each warp its rows

  const BlockPlace place = place_of(c);
  const Head h = head_of<APART>(c, place.head);
  const int start = place.block * kOwned, first_chunk = place.group * CHUNKS;
  const int chunks = CHUNKS == 1 ? 1 : (c.access.head_dim + kChunk - 1) / kChunk;
  if (place.group == 0) clear_uncovered(c, h, place.block, c.outputs.dw, nullptr);
  if (start >= h.length) return;
  const uint8_t* const key_mask = h.key_mask(c);
  const OtherTokens others = APART ? another_range(c, h) : itself(h, key_mask);
  const HeadRows own_w_at = rows_of(c, c.inputs.w, h), own_dout_at = rows_of(c, c.inputs.dout, h);
  const HeadRows w_at = APART ? rows_of(c, c.inputs.keys, h) : own_w_at;
  const HeadRows dout_at = APART ? rows_of(c, c.key_range.dout, h) : own_dout_at;
  const Thread t;
  // With more than one chunk, the memory of the owned rows is free once the scores are known.
  float* const second = CHUNKS > 1 ? own_w + t.warp_row * (kPitch - kWeightPitch) : weights;
  Numbers own[kPart];  // of the thread's rows
  bool own_is_key[kPart];
  unroll<kPart>([&](int n) {
    const int j = start + t.row_at(n);
    own[n] = numbers_of<false>(c, h, j);
    own_is_key[n] = j < h.length && (key_mask == nullptr || key_mask[j]);
  });
  float acc[CHUNKS][kPart][kColumns] = {};  // (kOwned, CHUNKS kChunk) per block

  // Without a gradient of the scores, owned rows are keys only.
  const int before = others.before + start;  // place of the first owned row
  const Span partners = partners_of(c.mask, {before, before + kOwned}, others.start + others.length, c.scores);
  const int minimum = APART ? max(partners.first - others.start, 0) : partners.first;
  const int begin = minimum / kTile * kTile, stop = partners.stop - others.start;
  for (int first = begin; first < stop; first += kTile) {
    // Roles of the warp's rows for this tile. Warps without rows or without a role only help to stage.
    const int mine = start + t.warp_row, tile = others.start + first;
    const Span owned = {before + t.warp_row, before + t.warp_row + kWarpRows}, met = {tile, tile + kTile};
    const bool are_keys = mine < h.length && meets(c.mask, met, owned);
    const bool are_queries = c.scores && mine < h.length && meets(c.mask, owned, met);
    float s[kPart][kPart] = {}, as_key[kPart][kPart] = {}, as_query[kPart][kPart] = {};  // (kOwned, kTile) per block
    int staged = 0;
    for (; staged < chunks; ++staged) {
      const int channel = staged * kChunk, channels = channels_of(c, staged);
      __syncthreads();
      if (CHUNKS > 1 || first == begin) {
        stage<kOwned>(c, own_w, own_w_at, start, h.length, channel);
        if (c.products) stage<kOwned>(c, own_dout, own_dout_at, start, h.length, channel);
      }
      stage<kTile>(c, tile_w, w_at, first, others.length, channel);
      if (c.values) stage<kTile>(c, tile_dout, dout_at, first, others.length, channel);
      __syncthreads();
      if (!are_keys && !are_queries) continue;
      float sum[kPart][kPart] = {};  // (kOwned, kTile) per block, of a chunk
      if (!c.products) {
        add_products<false, false>(sum, as_key, as_query, own_w, own_dout, tile_w, tile_dout, t, channels);
      } else if (are_keys && are_queries) {
        add_products<true, true>(sum, as_key, as_query, own_w, own_dout, tile_w, tile_dout, t, channels);
      } else if (are_keys) {
        add_products<true, false>(sum, as_key, as_query, own_w, own_dout, tile_w, tile_dout, t, channels);
      } else {
        add_products<false, true>(sum, as_key, as_query, own_w, own_dout, tile_w, tile_dout, t, channels);
      }
      add_sum(s, sum);
    }
    --staged;

    // s becomes the weights of dout, as_key the weights of w.
    if (are_keys || are_queries) {
      const uint32_t kept_p = are_keys ? keep_bits(c, h, before + t.row, tile + t.column, false) : 0;
      const uint32_t kept_q = are_queries ? keep_bits(c, h, before + t.row, tile + t.column, true) : 0;
      unroll<kPart>([&](int b) {
        const int n = first + t.column_at(b), i = others.start + n;
        const Numbers row = numbers_of<APART>(c, others, n);
        const bool row_is_key = n < others.length && (others.key_mask == nullptr || others.key_mask[n]);
        unroll<kPart>([&](int a) {
          const int j = before + t.row_at(a);
          const float score = scaled(s[a][b], c.scale);
          float p = own_is_key[a] && sees(c.mask, i, j) ? row.weight(score) : 0.0f;
          float q = are_queries && row_is_key && sees(c.mask, j, i) ? own[a].weight(score) : 0.0f;
          float value = p;
          if (c.scratch.select_level != nullptr) {
            value = p > row.level ? c.threshold : 0.0f;
            p *= c.threshold / row.level;
            q *= c.threshold / own[a].level;
          }
          const float factor_p = kept_p >> (kPart * a + b) & 1 ? c.keep_factor : 0.0f;
          const float factor_q = kept_q >> (kPart * a + b) & 1 ? c.keep_factor : 0.0f;
          // Round the products as delta's are. Add dlse after the differences, which may be small.
          const float key = __fmul_rn(factor_p, as_key[a][b]) - row.delta + row.dlse;
          const float query = __fmul_rn(factor_q, as_query[a][b]) - own[a].delta + own[a].dlse;
          as_key[a][b] = c.scale * (p * key + q * query);
          s[a][b] = value * factor_p;
        });
      });
    }

    const int count = min((others.length - first + 3) / 4 * 4, kTile);
    if (CHUNKS > 1) __syncwarp();  // `second` overwrites the owned rows that the warp has read
    put_weights(weights, s, t);
    if (CHUNKS > 1) put_weights(second, as_key, t);
    __syncwarp();
#pragma unroll
    for (int n = CHUNKS - 1; n >= 0; --n) {
      const int chunk = first_chunk + n;
      if (chunk * kChunk >= c.access.head_dim) continue;
      if (chunk != staged) {
        __syncthreads();
        stage<kTile>(c, tile_w, w_at, first, others.length, chunk * kChunk);
        if (c.values) stage<kTile>(c, tile_dout, dout_at, first, others.length, chunk * kChunk);
        __syncthreads();
      }
      if (!are_keys && !are_queries) continue;
      float sum[kPart][kColumns] = {};  // (kOwned, kChunk) per block, of a tile
      if (c.values && are_keys) add_weighted(sum, weights, tile_dout, t, count);
      if (CHUNKS == 1) {
        __syncwarp();
        put_weights(second, as_key, t);
        __syncwarp();
      }
      if (c.scores) add_weighted(sum, second, tile_w, t, count);
      add_sum(acc[n], sum);
    }
  }

  const float one[kPart] = {1.0f, 1.0f, 1.0f, 1.0f};
  write_rows(c, own_w, rows_of(c, c.outputs.dw, h, c.out_dtype), acc, one, t, start, h.length, first_chunk);
}

}  // namespace crate_kernels::plain
