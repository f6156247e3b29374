// Dropout as a function of (seed, position): Philox4x32-10 (Salmon et al., SC 2011), word 0.
#pragma once

#include "vec.h"

namespace {

// 64-bit lanes that hold 32-bit numbers, so that products fit.
typedef uint64_t Vq __attribute__((vector_size(CRATE_LANES * 4)));
typedef uint32_t Vh __attribute__((vector_size(CRATE_LANES * 2)));

// The product of the lanes' low halves.
CRATE_INLINE Vq wide_product(Vq x, uint32_t factor) {
#if CRATE_LANES == 16
  return (Vq)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif CRATE_X86_LEVELS && CRATE_LANES == 8
  return (Vq)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
  return (x & 0xffffffffu) * static_cast<uint64_t>(factor);
#endif
}

// word[n] = word 0 of Philox(key = seed, counter = (c0[n], c1, c2, 0)) for n < count, count a multiple of 16.
CRATE_INLINE void philox_word0(uint64_t seed, const int32_t* c0, uint32_t c1, uint32_t c2, int count, uint32_t* word) {
  constexpr int kWide = kLanes / 2, kChains = 16 / kWide;  // chains hide the latency of the products
  for (int start = 0; start < count; start += 16) {
    Vq a[kChains], b[kChains], c[kChains], d[kChains];
#pragma GCC unroll 8
    for (int n = 0; n < kChains; ++n) {
      Vh counters;
      memcpy(&counters, c0 + start + n * kWide, sizeof counters);
      a[n] = __builtin_convertvector(counters, Vq);
      b[n] = Vq{} + c1;
      c[n] = Vq{} + c2;
      d[n] = Vq{};
    }
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 8
      for (int n = 0; n < kChains; ++n) {
        const Vq p0 = wide_product(a[n], 0xD2511F53u), p1 = wide_product(c[n], 0xCD9E8D57u);
        // High halves are not cleared: products and the result take only the low ones.
        a[n] = (p1 >> 32) ^ b[n] ^ k0;
        b[n] = p1;
        c[n] = (p0 >> 32) ^ d[n] ^ k1;
        d[n] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
#pragma GCC unroll 8
    for (int n = 0; n < kChains; ++n) {
      const Vh low = __builtin_convertvector(a[n], Vh);
      memcpy(word + start + n * kWide, &low, sizeof low);
    }
  }
}

}  // namespace
