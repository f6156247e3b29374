// Vectors of the level that includes this: GCC vector extensions, so that one kernel source serves every level.
//
// The including file has set CRATE_LANES (floats a vector) and its `#pragma GCC target`. Everything here and in
// the kernels is in unnamed namespaces or always inlined: a symbol that two units share would be linked once, and
// the machine without the instructions could get the copy that uses them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if CRATE_X86_LEVELS
#include <immintrin.h>
#endif

#define CRATE_INLINE inline __attribute__((always_inline))

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
CRATE_INLINE Vi as_int(Vf v) {
  return (Vi)v;
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

// The value itself, which no later addition fuses with the product that made it.
CRATE_INLINE Vf rounded(Vf v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// Lane i takes lane i ^ distance.
CRATE_INLINE Vf exchange(Vf v, int distance) {
#if CRATE_X86_LEVELS
  return __builtin_shuffle(v, iota() ^ distance);
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
CRATE_INLINE float max(Vf v) {
#pragma GCC unroll 4
  for (int distance = kLanes / 2; distance > 0; distance /= 2) v = max(v, exchange(v, distance));
  return v[0];
}

// 2^x for x <= 126: exact at 0, within 2 ulp elsewhere, and exactly 0 where the result would be subnormal.
CRATE_INLINE Vf exp2(Vf x) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
  const float magic = 12582912.0f;
  const Vf clamped = max(x, splat(-126.0f));
  const Vf shifted = clamped + magic;
  const Vf f = clamped - (shifted - magic);  // in [-1/2, 1/2]
  // Minimax for the relative error, 4e-9, with p(0) = 1.
  Vf p = splat(1.55889820e-4f);
  p = p * f + 1.34047708e-3f;
  p = p * f + 9.61772876e-3f;
  p = p * f + 5.55031840e-2f;
  p = p * f + 2.40226524e-1f;
  p = p * f + 6.93147209e-1f;
  p = p * f + 1.0f;
  const Vf result = as_float(as_int(p) + (as_int(shifted) << 23));
  return select(x < -126.0f, Vf{}, result);
}

}  // namespace
