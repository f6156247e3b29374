// The forward of short sequences on tensor cores: a block owns a head, and computes each pair of tiles once.
//
// Scores are symmetric, and so are the weights P_ij = exp(s_ij - shift) with one shift for the whole head: the
// weights of tile i for tile j are the transpose of those of j for i. A pair of tiles takes three products instead of
// four, and one exponential instead of two:
//
//     out_i += P_ij w_j,        out_j += P_ij^T w_i.
//
// A tile is the 16 rows of a warp. The warp keeps them and their output in registers from start to end. All tiles are
// in shared memory. In step r warp i computes the weights of pair (i, i + r mod tiles), adds their terms to its own
// rows, and stores them in shared memory. There the warp of tile i + r reads them transposed. Each pair is computed
// once, all warps do equal work per step, and there are no atomics. w is read once and out is written once.
//
// With n_k = s_kk / 2, 2 min n <= s_kk and s_ij <= 2 max n. With the shift in the middle, no weight is above exp(max n
// - min n), and no row's sum is below exp(min n - max n). Heads outside the range of the weights' dtype take the online
// softmax of mma_rows.cuh, on the same tiles in shared memory. Row sums are products of the rounded weights with ones.
#pragma once

#include "mma_rows.cuh"

namespace crate_kernels::mssa {

constexpr int kMaxTiles = 16;  // 512 threads with 128 registers each

// From 2^29 on, the rounding of scores and norms makes weights of equal tokens overflow.
constexpr float kHighest = 1048576.0f;

// bf16: a row's sum is at least 2^-80, and a weight that underflows is 2^-46 of it. fp16 holds weights from 2^-24 to
// 2^16: the shift puts the largest at e^10. Rows at this distance then sum to e^-2 or more; 256 errors of half of 2^-24
// are an eighth of fp16's rounding of that.
template <class T>
struct PairRange {
  static constexpr float kMax = 55.0f;
  static CRATE_DEVICE float shift(float minimum, float maximum) { return maximum + minimum; }
};
template <>
struct PairRange<fp16> {
  static constexpr float kMax = 6.0f;
  static CRATE_DEVICE float shift(float, float maximum) { return 2.0f * maximum - 10.0f; }
};

// The smallest and the largest n of the head; `extremes` has two numbers per tile.
template <class T, int DIM>
CRATE_DEVICE float2 extent(const Own<T, DIM, 1, true>& own, float scale, int row, int length, float2* extremes) {
  float upper = 0.0f, lower = 0.0f;  // of rows g and g + 8
  unroll<DIM / 16, 4>([&](int k, int i) {
    const float2 w = unpack_pair<T>(own.fragments[0][k][i]);
    (i % 2 == 0 ? upper : lower) += w.x * w.x + w.y * w.y;
  });
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, tiles = blockDim.x / kWarp;
  upper = 0.5f * scale * row_sum(upper), lower = 0.5f * scale * row_sum(lower);
  // fminf and fmaxf hide a NaN but not infinity, which is also out of range.
  upper = upper == upper ? upper : INFINITY, lower = lower == lower ? lower : INFINITY;
  const bool has_upper = row + lane / 4 < length, has_lower = row + lane / 4 + 8 < length;
  const auto widen = [](float2 a, float2 b) { return make_float2(fminf(a.x, b.x), fmaxf(a.y, b.y)); };
  float2 e = make_float2(has_upper ? upper : INFINITY, has_upper ? upper : -INFINITY);
  if (has_lower) e = widen(e, make_float2(lower, lower));
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    e = widen(e, make_float2(__shfl_xor_sync(kAllLanes, e.x, step), __shfl_xor_sync(kAllLanes, e.y, step)));
  }
  if (lane == 0) extremes[warp] = e;
  __syncthreads();
  e = extremes[0];
  for (int n = 1; n < tiles; ++n) e = widen(e, extremes[n]);
  return e;
}

// The weights of a warp's rows and of the rows of tile j, 0 for rows beyond the length.
template <class T, int DIM>
CRATE_DEVICE void pair_weights(uint32_t (&p)[4], const Own<T, DIM, 1, true>& own, const T* tile, float scale,
                               float shift, int row, int column, int length) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float s[2][4] = {};  // (16, 16) per warp
  unroll<DIM / 16>([&](int k) {
    uint32_t b[2][2];  // (16, 16): 16 channels of the tile's rows
    right_transposed<DIM>(b, tile, k);
    add_pair<T>(s[0], s[1], own.fragments[0][k], b);
  });
  unroll<2, 4>([&](int n, int e) {
    const bool there = row + g + e / 2 * 8 < length && column + 8 * n + 2 * t + e % 2 < length;
    s[n][e] = there ? weight(s[n][e], scale, shift) : 0.0f;
  });
  pack_left<T>(p, s[0], s[1]);
}

// Adds p w, and p's row sums: every column of p's product with ones.
template <class T, int DIM>
CRATE_DEVICE void add_weighted(RowState<T, DIM, 1>& state, float (&sums)[4], const uint32_t (&p)[1][4], const T* tile) {
  const uint32_t one = pack_pair<T>(1.0f, 1.0f), ones[2] = {one, one};
  mma_16816<T>(sums, p[0], ones);
  add_rows<T, DIM>(state.acc, p, tile);
}

template <class T, int DIM>
CRATE_DEVICE void attend_pairs(RowState<T, DIM, 1>& state, const Own<T, DIM, 1, true>& own, const T* tiles, T* exchange,
                               float scale, float shift, int length) {
  const int lane = threadIdx.x % kWarp, i = threadIdx.x / kWarp, count = blockDim.x / kWarp;
  // With an even number of tiles, the first half of the warps computes the pairs that are half the tiles apart.
  const auto has_pair = [&](int tile, int step) { return 2 * step != count || tile < step; };
  float sums[4] = {};  // (16, 8) per warp: every column has the sums of the rows
  for (int step = 0; 2 * step <= count; ++step) {
    // Overwritten two steps later: by the barrier between, every warp has read it.
    T* const weights = exchange + step % 2 * kMaxTiles * 256;
    if (has_pair(i, step)) {
      const int j = (i + step) % count;
      uint32_t p[1][4];  // (16, 16) per warp: weights of the pair
      pair_weights<T, DIM>(p[0], own, tiles + j * 16 * DIM, scale, shift, 16 * i, 16 * j, length);
      add_weighted<T, DIM>(state, sums, p, tiles + j * 16 * DIM);
      unroll<4>([&](int n) {
        memcpy(weights + i * 256 + tile_offset<16>(lane / 4 + n % 2 * 8, n / 2) + lane % 4 * 2, &p[0][n],
               sizeof p[0][n]);
      });
    }
    if (step == 0) continue;  // a tile is paired with itself once
    __syncthreads();
    const int j = (i + count - step) % count;
    if (has_pair(j, step)) {
      uint32_t p[1][4];  // (16, 16) per warp: the pair's weights, transposed
      left_transposed<16>(p[0], weights + j * 256, 0);
      add_weighted<T, DIM>(state, sums, p, tiles + j * 16 * DIM);
    }
  }
  unroll<2>([&](int half) {
    state.sum[0][half] = sums[2 * half];
    state.largest[0][half] = shift;
  });
}

template <class T, int DIM>
CRATE_DEVICE void pairs_block(const Problem& call) {
  const Head head(call, blockIdx.x);
  const int tiles = blockDim.x / kWarp, row = threadIdx.x / kWarp * 16;
  T* const all = reinterpret_cast<T*>(shared_memory());                                // (16 tiles, DIM)
  T* const exchange = all + tiles * 16 * DIM;                                          // two of (kMaxTiles, 16, 16)
  float2* const extremes = reinterpret_cast<float2*>(exchange + 2 * kMaxTiles * 256);  // (tiles,)
  load_tile<T, DIM>(all, head.view<const T>(call, call.inputs.w), tiles * 16, 0, head.length, call.access);
  finish_copies();
  Own<T, DIM, 1, true> own;
  own.load(all + row * DIM);
  RowState<T, DIM, 1> state;
  const float2 e = extent<T, DIM>(own, call.scale, row, head.length, extremes);
  if (e.y - e.x <= PairRange<T>::kMax && e.y <= kHighest) {
    attend_pairs<T, DIM>(state, own, all, exchange, call.scale, PairRange<T>::shift(e.x, e.y), head.length);
  } else {
    const RowMask mask = {nullptr, 0, call.scale, head.length};
    for (int key = 0; key < head.length; key += 16) {
      attend_tile<16>(state, own, all + key * DIM, call, head, mask, Sign(1.0f), {row, key}, key + 16 > head.length,
                      Pass::online);
    }
    state.finish_sums();
  }
  __syncthreads();  // others read the own rows until here; out is staged there
  finish_rows<T, DIM, 1>(state, all + row * DIM, call, head, row);
}

// A plain softmax with a positive scale only; one warp per 16 tokens.
template <class T, int DIM>
__global__ void __launch_bounds__(kMaxTiles * 32) mma_pairs_kernel(Problem call) {
  if constexpr (kTensorCores) {
    pairs_block<T, DIM>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
