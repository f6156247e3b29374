// What the backward of long rows is made of: g^, d^ and c, and which heads it leaves.
#pragma once

#include "long_rows.cuh"
#include "scaled_row.cuh"

namespace crate_kernels::mssa {

// Of a tile: the largest and the smallest lse, in bits; the largest |g|; and 1 or 2, or both, if the rounding of out
// would show in dw, in its first 64 rows or its last.
constexpr int kRangeNumbers = 4;

// Measures each tile, and writes that nothing is left.
template <class T, int DIM>
__global__ void __launch_bounds__(kLongTile) long_range_kernel(const __grid_constant__ LongCall call) {
  __shared__ float of_warp[kLongTile / kWarp][3];  // (warps, 3): maximum, minimum, largest |g|
  const int tiles = (call.seqlen + kLongTile - 1) / kLongTile;
  const int index = blockIdx.x / tiles, tile = blockIdx.x % tiles, id = threadIdx.x, chunk = id & 7;
  if (tile == 0 && id == 0) call.left[index] = 0;
  const Head head(call, index);
  const int first = tile * kLongTile;
  if (first >= head.length) return;
  float maximum = -INFINITY, minimum = INFINITY, max_g = 0.0f;
  if (first + id < head.length) {
    const float lse = call.lse[head.row + first + id] * kLog2E;
    if (lse != -INFINITY) maximum = minimum = lse;
  }
  if constexpr (BackwardRange<T>::kHalf) {
    if (call.dlse != nullptr && first + id < head.length) {
      max_g = BackwardRange<T>::as_g(call.dlse[head.row + first + id], call.scale);
    }
    const T* const g = head.first<const T>(call, call.dout);
    for (int row = first + (id >> 3); row < min(first + kLongTile, head.length); row += kLongTile / 8) {
      for (int channel = 8 * chunk; channel < call.head_dim; channel += 64) {
        const uint4 bits = *reinterpret_cast<const uint4*>(g + row * call.dout.row + channel);
        const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
        unroll<4>([&](int i) {
          const float2 pair = unpack_pair<T>(pairs[i]);
          max_g = fmaxf(max_g, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        });
      }
    }
  }
  maximum = warp_max(maximum), minimum = -warp_max(-minimum), max_g = warp_max(max_g);
  if (id % kWarp == 0) {
    float* const to = of_warp[id / kWarp];
    to[0] = maximum, to[1] = minimum, to[2] = max_g;
  }
  __syncthreads();
  if (id > 0) return;
  for (int warp = 1; warp < kLongTile / static_cast<int>(kWarp); ++warp) {
    maximum = fmaxf(maximum, of_warp[warp][0]), minimum = fminf(minimum, of_warp[warp][1]);
    max_g = fmaxf(max_g, of_warp[warp][2]);
  }
  float* const to = call.tile_stats + (static_cast<int64_t>(index) * tiles + tile) * kRangeNumbers;
  to[0] = maximum, to[1] = minimum, to[2] = max_g;
}

// Writes g^ and d^ of every row, beside d^ whether it is a key, c of its head, and zeros as its sums. A head is left
// whose lse is out of range.
template <class T, int DIM>
__global__ void __launch_bounds__(kLongTile) long_scale_kernel(const __grid_constant__ LongCall call) {
  using R = BackwardRange<T>;
  const int tiles = (call.seqlen + kLongTile - 1) / kLongTile;
  const int index = blockIdx.x / tiles, tile = blockIdx.x % tiles, id = threadIdx.x, chunk = id & 7;
  const Head head(call, index);
  const int first = tile * kLongTile;
  if (first >= head.length) return;
  float maximum = -INFINITY, minimum = INFINITY, max_g = 0.0f;
  for (int n = id % kWarp; n < (head.length + kLongTile - 1) / kLongTile; n += kWarp) {
    const float* const from = call.tile_stats + (static_cast<int64_t>(index) * tiles + n) * kRangeNumbers;
    maximum = fmaxf(maximum, from[0]), minimum = fminf(minimum, from[1]), max_g = fmaxf(max_g, from[2]);
  }
  maximum = warp_max(maximum), minimum = -warp_max(-minimum), max_g = warp_max(max_g);
  const bool none = maximum == -INFINITY;  // no row has a key
  const float c = none ? 0.0f : maximum - R::kTop, unit = R::kHalf ? R::unit(max_g) : 1.0f;
  // The more weights of g^, the more errors of fp16's smallest.
  const float spread = R::kHalf ? R::kSpread - fmaxf(log2f(head.length / 256.0f), 0.0f) : R::kSpread;
  if (!none && !R::holds(minimum, maximum, spread)) {
    if (tile == 0 && id == 0) call.left[index] = head.length;
    return;
  }
  if (tile == 0 && id == 0) call.of_head[index] = make_float2(c, 1.0f / unit);
  for (int half = first / 64; call.sums != nullptr && half < first / 64 + 2 && 64 * half < head.length; ++half) {
    float4* const sums = reinterpret_cast<float4*>(call.sums_of(head, half, DIM));
    for (int i = id; i < 16 * DIM; i += kLongTile) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const T* const w = head.first<const T>(call, call.w);
  const T* const g = head.first<const T>(call, call.dout);
  const T* const out = head.first<const T>(call, call.out);
  T* const scaled_g = head.first<T>(call, call.scaled);
  const uint8_t* const key_mask = head.key_mask(call);
  bool shows[2] = {false, false};
  for (int row = first + (id >> 3); row < first + kLongTile; row += kLongTile / 8) {
    const bool there = row < head.length;
    const float lse = there ? call.lse[head.row + row] : -INFINITY;
    const float inverse = lse == -INFINITY ? 0.0f : exp2_fast(c - lse * kLog2E) * unit;
    const bool is_key = there && (key_mask == nullptr || key_mask[row]);
    ScaledRow<T> scaled;
#pragma unroll
    for (int panel = 0; panel < DIM / 64; ++panel) {
      const int channel = 64 * panel + 8 * chunk;
      if (!there || channel >= call.head_dim) continue;
      const auto of = [&](const T* from, const HeadTokens& tokens) {
        return *reinterpret_cast<const uint4*>(from + row * tokens.row + channel);
      };
      *reinterpret_cast<uint4*>(scaled_g + row * call.scaled.row + channel) =
          scaled.add(of(g, call.dout), of(out, call.out), of(w, call.w), inverse);
    }
    scaled.finish();
    const bool of_row = there && scaled.shows(call.scale, lse, is_key);
    shows[0] |= of_row && row < first + 64, shows[1] |= of_row && row >= first + 64;
    if (chunk == 0 && there) {
      if (call.dlse != nullptr) scaled.delta -= call.dlse[head.row + row] * inverse;
      call.numbers[head.row + row] = make_float2(scaled.delta, is_key ? 1.0f : 0.0f);
    }
  }
  const int upper = __syncthreads_count(shows[0]) != 0, lower = __syncthreads_count(shows[1]) != 0;
  if (id == 0) call.tile_stats[(static_cast<int64_t>(index) * tiles + tile) * kRangeNumbers + 3] = upper + 2 * lower;
}

}  // namespace crate_kernels::mssa
