// Dropout as a function of (seed, position): Philox4x32-10 (Salmon et al., SC 2011), word 0.
#pragma once

#include <stdint.h>

namespace {

// word[n] = word 0 of Philox(key = seed, counter = (c0[n], c1, c2, 0)) for n < count, count a multiple of 16.
//
// Plain loops over 16 counters at a time, which compilers turn into the level's 32 x 32 -> 64 products.
static inline void philox_word0(uint64_t seed, const int32_t* c0, uint32_t c1, uint32_t c2, int count, uint32_t* word) {
  constexpr int kGroup = 16;
  for (int start = 0; start < count; start += kGroup) {
    uint32_t a[kGroup], b[kGroup], c[kGroup], d[kGroup];
    for (int n = 0; n < kGroup; ++n) {
      a[n] = static_cast<uint32_t>(c0[start + n]);
      b[n] = c1;
      c[n] = c2;
      d[n] = 0;
    }
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int n = 0; n < kGroup; ++n) {
        const uint64_t p0 = static_cast<uint64_t>(a[n]) * 0xD2511F53u;
        const uint64_t p1 = static_cast<uint64_t>(c[n]) * 0xCD9E8D57u;
        a[n] = static_cast<uint32_t>(p1 >> 32) ^ b[n] ^ k0;
        b[n] = static_cast<uint32_t>(p1);
        c[n] = static_cast<uint32_t>(p0 >> 32) ^ d[n] ^ k1;
        d[n] = static_cast<uint32_t>(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int n = 0; n < kGroup; ++n) word[start + n] = a[n];
  }
}

}  // namespace
