// Converts rows of tensors to fp32 scratch and back, for every dtype and stride.
#pragma once

#include "../dtype.h"
#include "vec.h"

namespace {

using crate_kernels::Dtype;

CRATE_INLINE float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

CRATE_INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return f != f ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

// kLanes elements at once: a short row spends most of its time in the loop around a vectorised one.
typedef uint16_t Vs __attribute__((vector_size(CRATE_LANES * 2)));

// Intrinsics: GCC's own conversion goes by halves of a vector, in three more instructions.
CRATE_INLINE Vf load_bf16(const uint16_t* p) {
  Vs bits;
  memcpy(&bits, p, sizeof bits);
#if CRATE_LANES == 16
  return (Vf)((Vu)_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#elif CRATE_LANES == 8
  return (Vf)((Vu)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#else
  return (Vf)(__builtin_convertvector(bits, Vu) << 16);
#endif
}
// Rounds to nearest, subnormals included, which the instruction of AVX512-BF16 flushes.
CRATE_INLINE Vs round_to_bf16(Vf v) {
#if CRATE_BF16_DOT
  constexpr int kSubnormal = 0x20;
  if (_mm512_fpclass_ps_mask((__m512)v, kSubnormal) == 0) return (Vs)_mm512_cvtneps_pbh((__m512)v);
#endif
  const Vu bits = (Vu)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v != v ? Vu{} + 0x7fc0u : rounded, Vs);
}
CRATE_INLINE void store_bf16(uint16_t* p, Vf v) {
#if CRATE_BF16_DOT
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
#else
  const Vs halves = round_to_bf16(v);
#endif
  memcpy(p, &halves, sizeof halves);
}

// Arithmetic on the bits only, so that compilers vectorise it on every level.
CRATE_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  // 2^112 moves the exponent's bias from 15 to 127, subnormals included; infinity and NaN need more.
  const uint32_t shifted = magnitude << 13;
  float f;
  memcpy(&f, &shifted, 4);
  f *= 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  bits = (magnitude >= 0x7c00u ? shifted | 0x7f800000u : bits) | sign;
  memcpy(&f, &bits, 4);
  return f;
}

CRATE_INLINE uint16_t float_to_f16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or beyond
  if (bits < 0x38800000u) {  // subnormal in fp16: adding 1/2 aligns its last bit with float's
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

// out[d] = row[d * stride] for d < n.
CRATE_INLINE void read_row(const void* row, Dtype dtype, int64_t stride, int n, float* out) {
  if (dtype == Dtype::f32) {
    const float* p = static_cast<const float*>(row);
    if (stride == 1) {
      memcpy(out, p, n * sizeof(float));
    } else {
      for (int d = 0; d < n; ++d) out[d] = p[d * stride];
    }
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(row);
  uint16_t gathered[256];
  if (stride != 1) {
    for (int d = 0; d < n; ++d) gathered[d] = p[d * stride];
    p = gathered;
  }
  if (dtype == Dtype::bf16) {
    for (int d = 0; d < n; ++d) out[d] = bf16_to_float(p[d]);
  } else {
    for (int d = 0; d < n; ++d) out[d] = f16_to_float(p[d]);
  }
}

// row[d * stride] = factor * in[d] for d < n, rounded once.
CRATE_INLINE void write_row(void* row, Dtype dtype, int64_t stride, int n, const float* in, float factor = 1.0f) {
  if (dtype != Dtype::f16 && stride == 1 && n % kLanes == 0) {
    for (int d = 0; d < n; d += kLanes) {
      const Vf v = load(in + d) * factor;
      if (dtype == Dtype::f32) {
        store(static_cast<float*>(row) + d, v);
      } else {
        const Vs halves = round_to_bf16(v);
        memcpy(static_cast<uint16_t*>(row) + d, &halves, sizeof halves);
      }
    }
    return;
  }
  if (dtype == Dtype::f32) {
    float* const p = static_cast<float*>(row);
    if (stride == 1) {
      for (int d = 0; d < n; ++d) p[d] = factor * in[d];
    } else {
      for (int d = 0; d < n; ++d) p[d * stride] = factor * in[d];
    }
    return;
  }
  uint16_t rounded[256];
  if (dtype == Dtype::bf16) {
    for (int d = 0; d < n; ++d) rounded[d] = float_to_bf16(factor * in[d]);
  } else {
    for (int d = 0; d < n; ++d) rounded[d] = float_to_f16(factor * in[d]);
  }
  uint16_t* const p = static_cast<uint16_t*>(row);
  if (stride == 1) {
    memcpy(p, rounded, n * sizeof(uint16_t));
  } else {
    for (int d = 0; d < n; ++d) p[d * stride] = rounded[d];
  }
}

}  // namespace
