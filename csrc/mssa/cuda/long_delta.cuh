// d^ of the rows of which the rounding of out would show in dw, for the backward of long rows: summed from the products
// that it is subtracted from (head_gradient.cuh).
#pragma once

#include "long_scale.cuh"

namespace crate_kernels::mssa {

template <class T_, int DIM_>
struct LongDeltaShape {
  using T = T_;
  static constexpr int kDim = DIM_, kPanels = kDim / 64, kTile = 64;
  static constexpr uint32_t kPanel = kTile * kRowBytes, kTokens = kPanels * kPanel;
  static constexpr uint32_t kKeys = 3 * kTokens, kBytes = kKeys + 16;  // own w and g^, a tile, which tokens are keys
};

// A block is one warp group and has 64 rows; most have none to do.
template <class T, int DIM>
__global__ void __launch_bounds__(128) long_delta_kernel(const __grid_constant__ LongCall call, int causal) {
  using S = LongDeltaShape<T, DIM>;
  using Tile = Copied<S, S::kTile, S::kPanel>;
  const int tiles = (call.seqlen + kLongTile - 1) / kLongTile, index = blockIdx.x / (2 * tiles);
  const int place = blockIdx.x % (2 * tiles), first = 64 * place;
  const Head head(call, index);
  if (first >= head.length || call.left[index] != 0) return;
  const float shows = call.tile_stats[(static_cast<int64_t>(index) * tiles + place / 2) * kRangeNumbers + 3];
  if ((static_cast<int>(shows) >> place % 2 & 1) == 0) return;
  const uint32_t base = shared_address(aligned_shared_memory()), tile = base + 2 * S::kTokens;
  const int id = threadIdx.x, lane = id % kWarp, warp = id / kWarp;
  const uint8_t* const key_mask = head.key_mask(call);
  const float2 of_head = call.of_head[index];
  load_tokens<Tile>(call, head, call.w, base, nullptr, first);
  load_tokens<Tile>(call, head, call.scaled, base + S::kTokens, nullptr, first);
  float total[2] = {0.0f, 0.0f}, products[2] = {0.0f, 0.0f};  // of the thread's two rows
  const int row = first + 16 * warp + (lane >> 2), end = causal ? min(head.length, first + 64) : head.length;
#pragma unroll 1
  for (int column = 0; column < end; column += S::kTile) {
    __syncthreads();  // the tile before has been read
    load_tokens<Tile>(call, head, call.w, tile, key_mask, column);
    copy_async_commit();
    const int token = column + id;
    const uint32_t bits =
        __ballot_sync(kAllLanes, id < S::kTile && token < head.length && (key_mask == nullptr || key_mask[token]));
    if (lane == 0 && id < S::kTile) store_shared(base + S::kKeys + 4 * warp, __uint_as_float(bits));
    copy_async_wait<0>();
    fence_async_shared();
    __syncthreads();
    float s[S::kTile / 2], t[S::kTile / 2];  // (64, kTile) per block: w_i.w_j, g^_i.w_j
    wgmma_fence();
    add_scores<T, S::kTile, DIM>(s, base, tile, S::kPanel, false);
    add_scores<T, S::kTile, DIM>(t, base + S::kTokens, tile, S::kPanel, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s), pin(t);
    const float2 words = load_shared_2(base + S::kKeys);
    const uint32_t keys[2] = {__float_as_uint(words.x), __float_as_uint(words.y)};
    unroll<2, 2>([&](int half, int word) {
      const uint32_t seen = causal ? bits_up_to(row + 8 * half - column - 32 * word) : ~0u;
      const uint32_t mine = (keys[word] & seen) >> (lane & 3) * 2;
      unroll<8>([&](int n) {
        const int i = 16 * word + n / 2 * 4 + 2 * half + n % 2;
        const float weight = mine >> (n / 2 * 8 + n % 2) & 1 ? exp2_fast(s[i] * call.factor - of_head.x) : 0.0f;
        total[half] += weight;
        products[half] += weight * t[i];
      });
    });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      total[half] += __shfl_xor_sync(kAllLanes, total[half], step);
      products[half] += __shfl_xor_sync(kAllLanes, products[half], step);
    }
    const int i = row + 8 * half;
    if ((lane & 3) != 0 || i >= head.length || total[half] == 0.0f) continue;
    float d = products[half] / total[half];
    if (call.dlse != nullptr) {
      d -= call.dlse[head.row + i] * exp2_fast(of_head.x - call.lse[head.row + i] * kLog2E) / of_head.y;
    }
    call.numbers[head.row + i].x = d;
  }
}

}  // namespace crate_kernels::mssa
