// Vectors of the level that includes this header: GCC vector extensions, so that one kernel source serves every level.
//
// Before, the including file sets CRATE_LANES (floats per vector) and its `#pragma GCC target`. Everything here and in
// the kernels is in unnamed namespaces or always inlined. Otherwise the linker would keep one copy of a symbol that two
// units share, and a machine could get the copy with instructions that it lacks.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if CRATE_X86_LEVELS
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CRATE_LAMBDA __attribute__((always_inline))  // between the parameters and the body of a lambda
#define CRATE_INLINE inline CRATE_LAMBDA

namespace {

constexpr int kLanes = CRATE_LANES;
typedef float Vf __attribute__((vector_size(CRATE_LANES * 4)));
typedef int32_t Vi __attribute__((vector_size(CRATE_LANES * 4)));
typedef uint32_t Vu __attribute__((vector_size(CRATE_LANES * 4)));

CRATE_INLINE Vf load(const float* p) {
  Vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
CRATE_INLINE void store(float* p, Vf v) {
  memcpy(p, &v, sizeof v);
}
CRATE_INLINE Vf splat(float x) {
  return x - Vf{};
}
CRATE_INLINE Vi splat(int32_t x) {
  return x - Vi{};
}
CRATE_INLINE Vf as_float(Vi v) {
  return (Vf)v;
}

CRATE_INLINE Vi iota() {
  Vi v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}
CRATE_INLINE Vf select(Vi mask, Vf yes, Vf no) {
  return mask ? yes : no;
}
CRATE_INLINE Vf max(Vf a, Vf b) {
  return a > b ? a : b;
}

// c + a * b, rounded once on every level that can. Written as a sum, GCC 16 rounds the product too in some loops with
// one sum, and what another loop makes of the same numbers has other bits.
CRATE_INLINE Vf multiply_add(Vf c, Vf a, Vf b) {
#if CRATE_LANES == 16
  return (Vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif CRATE_LANES == 8
  return (Vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return c + a * b;
#endif
}

// Returns v, and keeps the compiler from fusing the product that made v with a later addition.
CRATE_INLINE Vf rounded(Vf v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// Lane i takes lane[i] of a, or lane[i] - kLanes of b. Lanes must be known to the compiler.
CRATE_INLINE Vf shuffle(Vf a, Vf b, Vi lane) {
#if defined(__clang__)
  Vf v;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) v[i] = lane[i] < kLanes ? a[lane[i]] : b[lane[i] - kLanes];
  return v;
#else
  return __builtin_shuffle(a, b, lane);
#endif
}

// Lane i takes lane i ^ distance.
CRATE_INLINE Vf exchange(Vf v, int distance) {
#if CRATE_X86_LEVELS
  return shuffle(v, v, iota() ^ distance);
#else
  Vf swapped;
  for (int i = 0; i < kLanes; ++i) swapped[i] = v[i ^ distance];
  return swapped;
#endif
}
CRATE_INLINE float sum(Vf v) {
#pragma GCC unroll 4
  for (int distance = kLanes / 2; distance > 0; distance /= 2) v += exchange(v, distance);
  return v[0];
}
// Lane n is the sum of v[n]. Overwrites v.
CRATE_INLINE Vf sums(Vf (&v)[kLanes]) {
#if CRATE_X86_LEVELS
  const Vi lane = iota();
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    // Where the bit `half` of a lane is set it serves v[n + half], elsewhere v[n]. Each adds its own two halves.
    const Vi second = (lane & half) != 0;
#pragma GCC unroll 8
    for (int n = 0; n < half; ++n) {
      v[n] = shuffle(v[n], v[n + half], second ? lane + kLanes : lane) +
             shuffle(v[n], v[n + half], second ? lane - half + kLanes : lane + half);
    }
  }
  return v[0];
#else
  Vf found;
  for (int n = 0; n < kLanes; ++n) found[n] = sum(v[n]);
  return found;
#endif
}
CRATE_INLINE float max(Vf v) {
#pragma GCC unroll 4
  for (int distance = kLanes / 2; distance > 0; distance /= 2) v = max(v, exchange(v, distance));
  return v[0];
}

// round_to_integer: to nearest. times_power: p / kUnit * 2^whole for an integer `whole`, or 0 if whole < -125. A NaN
// stays one, whatever its payload.
#if CRATE_LANES == 16
constexpr float kUnit = 1.0f;
CRATE_INLINE Vf round_to_integer(Vf x) {
  return (Vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CRATE_INLINE Vf times_power(Vf p, Vf whole) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)whole, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  return (Vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
}
#else
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds, with the integer in the low bits
CRATE_INLINE Vf round_to_integer(Vf x) {
  return (x + kMagic) - kMagic;
}
// With 2 no product is subnormal for p from 1/sqrt(2) to sqrt(2) times it, not even one that is not selected:
// processors are slow to make these.
constexpr float kUnit = 2.0f;
CRATE_INLINE Vf times_power(Vf p, Vf whole) {
  // The exponent of 2^whole / kUnit. Far below -125 it wraps, and the product is not selected.
  const Vf power = (Vf)((Vu)(whole + (kMagic + 126.0f)) << 23);
  return select(whole < -125.0f, Vf{}, p * power);
}
#endif

// x = 2^(x - power) for x - power <= 126: exact at 0, within 2 ulp elsewhere, and exactly 0 below 2^-125.5, so that
// none is subnormal. `power`, null for 0, holds integers: the exponent takes them, so their difference from x is not
// rounded.
//
// Each step runs for all vectors before the next one. Vector after vector, the chains of 12 dependent instructions fill
// the scheduler, and a forward of 197 tokens takes 4% longer.
template <int kCount>
CRATE_INLINE void exp2(Vf (&x)[kCount], const Vf* power = nullptr) {
  // Minimax for the relative error on [-1/2, 1/2], 4e-9, with p(0) = 1; times kUnit, which rounds nothing.
  const float coefficients[] = {1.34047708e-3f, 9.61772876e-3f, 5.55031840e-2f, 2.40226524e-1f, 6.93147209e-1f, 1.0f};
  Vf whole[kCount], p[kCount];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) whole[n] = round_to_integer(x[n]);
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] -= whole[n];
#pragma GCC unroll 8
  for (int n = 0; power != nullptr && n < kCount; ++n) whole[n] -= power[n];
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) p[n] = splat(kUnit * 1.55889820e-4f);
#pragma GCC unroll 8
  for (const float c : coefficients) {
#pragma GCC unroll 8
    for (int n = 0; n < kCount; ++n) p[n] = p[n] * x[n] + kUnit * c;
  }
#pragma GCC unroll 8
  for (int n = 0; n < kCount; ++n) x[n] = times_power(p[n], whole[n]);
}
CRATE_INLINE Vf exp2(Vf x) {
  Vf one[1] = {x};
  exp2(one);
  return one[0];
}

// log2 of a positive normal float, in double: within 1e-12, and exact for powers of two. For loops that the compiler
// turns into vectors.
CRATE_INLINE double log2_of(float x) {
  constexpr int32_t kRootHalf = 0x3f3504f3;
  int32_t bits;
  memcpy(&bits, &x, 4);
  const int32_t exponent = (bits - kRootHalf) >> 23, mantissa_bits = bits - exponent * (1 << 23);
  float mantissa;  // from sqrt(1/2) to sqrt(2)
  memcpy(&mantissa, &mantissa_bits, 4);
  // log2 m = 2 / ln 2 artanh s, with |s| < 0.172: the first term left out is 2 / ln 2 s^15 / 15.
  const double m = mantissa, s = (m - 1.0) / (m + 1.0), square = s * s;
  const double odd[] = {1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0};
  double series = 1.0 / 13;
  for (const double c : odd) series = series * square + c;
  return exponent + s * series * 2.8853900817779268;
}

// 2^x for |x| <= 1000, within 6e-9 before it is rounded. For loops that the compiler turns into vectors.
CRATE_INLINE float exp2_of(double x) {
  constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds, with the integer in the low bits
  const double shifted = x + kRounds, f = (x - (shifted - kRounds)) * 0.6931471805599453;
  // Of e^f with |f| < 0.347: the first term left out is f^8 / 40320.
  const double coefficients[] = {1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0};
  double series = 1.0 / 5040;
  for (const double c : coefficients) series = series * f + c;
  uint64_t bits, whole;
  memcpy(&bits, &series, 8);
  memcpy(&whole, &shifted, 8);
  bits += whole << 52;
  memcpy(&series, &bits, 8);
  return static_cast<float>(series);
}

}  // namespace
