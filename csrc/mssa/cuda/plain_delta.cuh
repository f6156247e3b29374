// What the backward by fp32 products needs of each row: delta_i = dout_i . out_i, which it subtracts from each product
// dout_i.w_j, and `lse_residual`, what rounding took from lse.
//
// With dropout delta is summed from those products themselves; mma_shift.cuh says why. So it is where one weight makes
// up a row and its score is large: a rounding of out, or of lse, is then multiplied by that score. And so it is of
// rows where the rounding of out would show in dw, whatever their scores.
#pragma once

#include "plain_forward.cuh"
#include "rounding.cuh"

namespace crate_kernels::plain {

// Writes delta = sum_d dout out of kOwned rows. A thread sums a row channel by channel, in the order of the main
// kernel's products: if a weight is near 1, out is near w, and dout.w - delta cancels. If wanted, sets `lse_residual`
// where the rounding of out would show.
__global__ void __launch_bounds__(kThreads) mssa_plain_delta_kernel(Problem c) {
  float* const dout = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const out = dout + kOwned * kPitch;                      // (kOwned, kChunk)
  const Head h(c, blockIdx.x / c.blocks);
  const int start = blockIdx.x % c.blocks * kOwned, row = start + static_cast<int>(threadIdx.x);
  if (start >= h.length) return;
  float delta = 0.0f, squares = 0.0f, max_dout = 0.0f, max_out = 0.0f;
  const HeadRows dout_at = rows_of(c, c.inputs.dout, h), out_at = rows_of(c, c.outputs.out, h);
  for (int chunk = 0; chunk * kChunk < c.access.head_dim; ++chunk) {
    __syncthreads();
    stage<kOwned>(c, dout, dout_at, start, h.length, chunk * kChunk);
    stage<kOwned>(c, out, out_at, start, h.length, chunk * kChunk);
    __syncthreads();
    if (threadIdx.x >= kOwned) continue;
    const int channels = channels_of(c, chunk);
    for (int d = 0; d < channels; d += 4) {
      float a[4], b[4];  // (4 channels,) of a row of dout and of out
      load4(dout + threadIdx.x * kPitch + d, a);
      load4(out + threadIdx.x * kPitch + d, b);
      unroll<4>([&](int k) {
        delta += a[k] * b[k];  // one multiply-add, as the main kernel's: a product in a variable would not be fused
        squares += (a[k] * a[k]) * (b[k] * b[k]);
        max_dout = fmaxf(max_dout, fabsf(a[k]));
        max_out = fmaxf(max_out, fabsf(b[k]));
      });
    }
  }
  const float maximum = mssa::kMaxRounding * warp_max(max_dout), rounding = fabsf(c.scale) * max_out * sqrtf(squares);
  if (threadIdx.x >= kOwned || row >= h.length) return;
  c.scratch.delta[h.row + row] = delta;
  if (c.scratch.lse_residual != nullptr) c.scratch.lse_residual[h.row + row] = rounding > maximum ? 1.0f : 0.0f;
}

// s += w_j.w_i; as_key += w_j.dout_i if KEY; as_query += dout_j.w_i if QUERY. j: owned rows; i: rows of the tile.
template <bool KEY, bool QUERY>
CRATE_DEVICE void add_products(float (&s)[kPart][kPart], float (&as_key)[kPart][kPart], float (&as_query)[kPart][kPart],
                               const float* own_w, const float* own_dout, const float* tile_w, const float* tile_dout,
                               const Thread& t, int channels) {
#pragma unroll 1
  for (int c = 0; c < channels; c += 4) {
    float w[kPart][4], dout[kPart][4], wi[kPart][4];  // (kPart rows, 4 channels) per thread
    unroll<kPart>([&](int n) {
      load4(own_w + t.row_at(n) * kPitch + c, w[n]);
      if (QUERY) load4(own_dout + t.row_at(n) * kPitch + c, dout[n]);
      load4(tile_w + t.column_at(n) * kPitch + c, wi[n]);
    });
    unroll<kPart>([&](int j) {
      float dout_i[4] = {};
      if (KEY) load4(tile_dout + t.column_at(j) * kPitch + c, dout_i);
      unroll<4, kPart>([&](int k, int i) {
        s[i][j] += w[i][k] * wi[j][k];
        if (KEY) as_key[i][j] += w[i][k] * dout_i[k];
        if (QUERY) as_query[i][j] += dout[i][k] * wi[j][k];
      });
    });
  }
}

// Beyond this, lse is not exact enough, or one of n keys has nearly all of its row's weight.
constexpr float kMaxLse = 16.0f, kMaxAboveKeys = 6.0f;

CRATE_DEVICE bool is_far(float lse, int keys) {
  return fabsf(lse) > kMaxLse || lse - logf(static_cast<float>(keys)) > kMaxAboveKeys;
}

// Writes delta from the products themselves, and lse_residual: of every row with dropout, else of blocks that have a
// row far out, or one whose delta shows the rounding of out; of other blocks lse_residual = 0 alone.
__global__ void __launch_bounds__(kThreads) mssa_plain_measure_kernel(Problem c) {
  float* const own_w = reinterpret_cast<float*>(shared_memory());  // (kOwned, kChunk)
  float* const own_dout = own_w + kOwned * kPitch;
  float* const tile = own_dout + kOwned * kPitch;  // (kTile, kChunk)
  const Head h(c, blockIdx.x / c.blocks);
  const int start = blockIdx.x % c.blocks * kOwned;
  if (start >= h.length) return;
  const int row_here = start + static_cast<int>(threadIdx.x);
  const bool here = threadIdx.x < kOwned && row_here < h.length;
  const auto shows = [&] {
    return c.products && c.masking.seed == nullptr && c.scratch.lse_residual[h.row + row_here] != 0.0f;
  };
  const float lse = here ? c.outputs.lse[h.row + row_here] : -INFINITY;
  const bool far = lse > -INFINITY && (is_far(lse, h.length) || shows());
  if (__syncthreads_count(far) == 0 && (c.masking.seed == nullptr || !c.products)) {
    if (here) c.scratch.lse_residual[h.row + row_here] = 0.0f;
    return;
  }
  const uint8_t* const key_mask = h.key_mask(c);
  const HeadRows w_at = rows_of(c, c.inputs.w, h), dout_at = rows_of(c, c.inputs.dout, h);
  const Span keys = keys_of(c.mask, {start, start + kOwned}, h.length);
  const int begin = keys.first / kTile * kTile;
  const int chunks = (c.access.head_dim + kChunk - 1) / kChunk;
  const Thread t;
  Softmax row[kPart];  // of the thread's rows
  float delta[kPart] = {};
  for (int first = begin; first < keys.stop; first += kTile) {
    float s[kPart][kPart] = {}, d[kPart][kPart] = {}, none[kPart][kPart] = {};  // (kOwned, kTile) per block
    for (int chunk = 0; chunk < chunks; ++chunk) {
      __syncthreads();
      if (chunks > 1 || first == begin) {
        stage<kOwned>(c, own_w, w_at, start, h.length, chunk * kChunk);
        stage<kOwned>(c, own_dout, dout_at, start, h.length, chunk * kChunk);
      }
      stage<kTile>(c, tile, w_at, first, h.length, chunk * kChunk);
      __syncthreads();
      float sum[kPart][kPart] = {};  // (kOwned, kTile) per block, of a chunk
      add_products<false, true>(sum, none, d, own_w, own_dout, tile, nullptr, t, channels_of(c, chunk));
      add_sum(s, sum);
    }
    const uint32_t kept = keep_bits(c, h, start + t.row, first + t.column, true);
    unroll<kPart>([&](int i) {
      unroll<kPart>([&](int j) {
        const int key = first + t.column_at(j);
        const bool seen =
            key < h.length && (key_mask == nullptr || key_mask[key]) && sees(c.mask, start + t.row_at(i), key);
        s[i][j] = seen ? scaled(s[i][j], c.scale) : -INFINITY;
      });
      delta[i] *= weigh(s[i], row[i]);
      unroll<kPart>([&](int j) {
        if (kept >> (kPart * i + j) & 1) delta[i] += s[i][j] * __fmul_rn(c.keep_factor, d[i][j]);
      });
    });
  }
  unroll<kPart>([&](int i) {
    const float sum = row_sum(row[i].sum), total = row_sum(delta[i]);
    const int query = start + t.row_at(i);
    if (t.column != 0 || query >= h.length) return;
    const int64_t at = h.row + query;
    if (c.products) c.scratch.delta[at] = sum == 0.0f ? 0.0f : total / sum;
    c.scratch.lse_residual[at] = sum == 0.0f ? 0.0f : row[i].largest - c.outputs.lse[at] + logf(sum);
  });
}

}  // namespace crate_kernels::plain
