// One pass for everything between two products of a sparse-coding step; and a square matrix plus its transpose.
#pragma once

#include "../../common/cuda/device.cuh"

namespace crate_kernels {

// out = act(base + [gate != 0] gated + scale product). A gate without `gated` clears out where the gate is zero.
struct IstaUpdate {
  Operand product, base, gated, gate, out;
  int64_t numel;
  float scale, threshold;
  bool gate_all;
  bool nonnegative;  // act(v) = max(v - threshold, 0), else sign(v) max(|v| - threshold, 0)
  bool wide;         // every address is aligned to 16 bytes
};

constexpr int kIstaThreads = 256, kIstaItems = 8;  // 16 bytes of halves

// Reads items [at, at + count) of an operand.
CRATE_DEVICE void read_items(const Operand& operand, int64_t at, int count, bool wide, float (&v)[kIstaItems]) {
  if (operand.dtype == Dtype::f32) {
    const float* const from = static_cast<const float*>(operand.data) + at;
    if (wide) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pack<float> pack = load_pack(from + 4 * half);
#pragma unroll
        for (int n = 0; n < 4; ++n) v[4 * half + n] = pack.at[n];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kIstaItems; ++n) {
        if (n < count) v[n] = from[n];
      }
    }
    return;
  }
  // 16 bits of either half format; all threads take the same branch.
  const uint16_t* const from = static_cast<const uint16_t*>(operand.data) + at;
  Pack<uint16_t> pack;
  if (wide) {
    pack = load_pack(from);
  } else {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) pack.at[n] = n < count ? from[n] : 0;
  }
  if (operand.dtype == Dtype::bf16) {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) v[n] = to_float(bf16{pack.at[n]});
  } else {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) v[n] = to_float(fp16{pack.at[n]});
  }
}

CRATE_DEVICE void write_items(const Operand& operand, int64_t at, int count, bool wide, const float (&v)[kIstaItems]) {
  if (operand.dtype == Dtype::f32) {
    float* const to = static_cast<float*>(operand.data) + at;
    if (wide) {
      store_pack(to, {v[0], v[1], v[2], v[3]});
      store_pack(to + 4, {v[4], v[5], v[6], v[7]});
    } else {
#pragma unroll
      for (int n = 0; n < kIstaItems; ++n) {
        if (n < count) to[n] = v[n];
      }
    }
    return;
  }
  uint16_t* const to = static_cast<uint16_t*>(operand.data) + at;
  Pack<uint16_t> pack;
  if (operand.dtype == Dtype::bf16) {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) pack.at[n] = bf16_bits(v[n]);
  } else {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) pack.at[n] = fp16_bits(v[n]);
  }
  if (wide) {
    store_pack(to, pack);
  } else {
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) {
      if (n < count) to[n] = pack.at[n];
    }
  }
}

// Comparisons keep NaN, as in PyTorch. A two-sided threshold of zero changes nothing.
CRATE_DEVICE float ista_shrink(float v, float threshold, bool nonnegative) {
  if (nonnegative) {
    v -= threshold;
    return v <= 0.0f ? 0.0f : v;
  }
  if (threshold == 0.0f) return v;
  return v > threshold ? v - threshold : v < -threshold ? v + threshold : v * 0.0f;
}

// Each thread computes kIstaItems neighbours. The output may be any of the operands.
__global__ void __launch_bounds__(kIstaThreads) ista_update_kernel(IstaUpdate u) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kIstaThreads + threadIdx.x) * kIstaItems;
  if (at >= u.numel) return;
  const int count = static_cast<int>(u.numel - at < kIstaItems ? u.numel - at : kIstaItems);
  const bool wide = u.wide && count == kIstaItems;
  float v[kIstaItems] = {}, other[kIstaItems], gate[kIstaItems];  // (kIstaItems,) per thread
  if (u.product.data != nullptr) {
    read_items(u.product, at, count, wide, v);
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) v[n] *= u.scale;
  }
  if (u.base.data != nullptr) {
    read_items(u.base, at, count, wide, other);
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) v[n] += other[n];
  }
  if (u.gate.data != nullptr) read_items(u.gate, at, count, wide, gate);
  if (u.gated.data != nullptr) {
    read_items(u.gated, at, count, wide, other);
#pragma unroll
    for (int n = 0; n < kIstaItems; ++n) v[n] += gate[n] != 0.0f ? other[n] : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kIstaItems; ++n) {
    v[n] = ista_shrink(v[n], u.threshold, u.nonnegative);
    if (u.gate_all && gate[n] == 0.0f) v[n] = 0.0f;
  }
  write_items(u.out, at, count, wide, v);
}

constexpr int kIstaTile = 32, kIstaTileRows = 8;  // 32 x 8 threads per tile of 32 x 32

// both = a + a^T for a square a. Tile (i, j) needs tiles (i, j) and (j, i) of a.
template <class T>
__global__ void __launch_bounds__(kIstaTile* kIstaTileRows) ista_symmetrize_kernel(const T* a, T* both, int64_t dim) {
  float (*const tile)[kIstaTile + 1] = reinterpret_cast<float (*)[kIstaTile + 1]>(shared_memory());
  const int64_t tiles = (dim + kIstaTile - 1) / kIstaTile;
  const int64_t row0 = blockIdx.x / tiles * kIstaTile, column0 = blockIdx.x % tiles * kIstaTile;
  const int lane = threadIdx.x % kIstaTile, first = threadIdx.x / kIstaTile;
  for (int r = first; r < kIstaTile; r += kIstaTileRows) {
    if (column0 + r < dim && row0 + lane < dim) tile[r][lane] = to_float(a[(column0 + r) * dim + row0 + lane]);
  }
  __syncthreads();
  for (int r = first; r < kIstaTile; r += kIstaTileRows) {
    const int64_t row = row0 + r, column = column0 + lane;
    if (row < dim && column < dim) {
      both[row * dim + column] = from_float<T>(to_float(a[row * dim + column]) + tile[lane][r]);
    }
  }
}

}  // namespace crate_kernels
