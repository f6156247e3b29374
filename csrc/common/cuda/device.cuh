// Shared by the kernels of several operators: shared memory, element types, sums over warps and blocks, wide loads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef __CUDACC__
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#endif

#include "../dtype.h"

#define CRATE_DEVICE __device__ __forceinline__

namespace crate_kernels {

constexpr unsigned kWarp = 32, kAllLanes = 0xffffffffu;

// Calls f(i) for every i below N, or f(i, j) for every pair below M and N, unrolled: arrays indexed by them stay in
// registers.
template <int N, class F>
CRATE_DEVICE void unroll(const F& f) {
#pragma unroll
  for (int i = 0; i < N; ++i) f(i);
}
template <int M, int N, class F>
CRATE_DEVICE void unroll(const F& f) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) f(i, j);
  }
}

// The dynamic shared memory of the block.
CRATE_DEVICE unsigned char* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char crate_shared_memory[];
  return crate_shared_memory;
#else
  return emulator::shared_memory();
#endif
}

// Storage types of 16 bits; arithmetic is in fp32.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

CRATE_DEVICE float to_float(float v) {
  return v;
}

CRATE_DEVICE float to_float(bf16 v) {
  return __uint_as_float(static_cast<uint32_t>(v.bits) << 16);
}

CRATE_DEVICE float to_float(fp16 v) {
#ifdef __CUDACC__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
#else
  return c10::detail::fp16_ieee_to_fp32_value(v.bits);
#endif
}

CRATE_DEVICE uint16_t bf16_bits(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(v));
  return static_cast<uint16_t>(pair);
#else
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

CRATE_DEVICE uint16_t fp16_bits(float v) {
#ifdef __CUDACC__
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
#else
  return c10::detail::fp16_ieee_from_fp32_value(v);
#endif
}

// v rounded to the nearest T, ties to even.
template <class T>
CRATE_DEVICE T from_float(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return {std::is_same_v<T, bf16> ? bf16_bits(v) : fp16_bits(v)};
  }
}

// Packs two halves into a register, `low` in the low bits, the form of matrix fragments and wide stores.
template <class T>
CRATE_DEVICE uint32_t pack_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
#endif
}

template <class T>
CRATE_DEVICE float2 unpack_pair(uint32_t pair) {
  const T low = {static_cast<uint16_t>(pair)}, high = {static_cast<uint16_t>(pair >> 16)};
  return make_float2(to_float(low), to_float(high));
}

CRATE_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

CRATE_DEVICE float warp_max(float v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}

// Sums v over the block: the same bits in every thread and every run. `scratch` is shared memory, one float per warp.
// It may be written again after the block's next barrier.
CRATE_DEVICE float block_sum(float v, float* scratch) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  v = warp_sum(v);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

// 16 bytes of T in one access. The address must be aligned to them.
template <class T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

template <class T>
CRATE_DEVICE Pack<T> load_pack(const T* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  Pack<T> pack;
  memcpy(&pack, &bits, sizeof bits);
  return pack;
}

template <class T>
CRATE_DEVICE void store_pack(T* to, const Pack<T>& pack) {
  uint4 bits;
  memcpy(&bits, &pack, sizeof bits);
  *reinterpret_cast<uint4*>(to) = bits;
}

}  // namespace crate_kernels
