// Masks and weights of the tensor-core kernels of subspace attention.
#pragma once

#include "head.cuh"
#include "mma_tile.cuh"

namespace crate_kernels::mssa {

// Dropout mask of 16 rows and COLUMNS columns: bit 4 n + e keeps element e of the n-th product of 8 columns. Rows are
// queries and columns keys, or the reverse. Not unrolled: each Philox word takes 100 instructions.
template <int COLUMNS>
CRATE_DEVICE uint32_t kept_bits(uint64_t seed, const Problem& call, const Head& head, int row, int column,
                                bool reverse) {
  static_assert(COLUMNS <= 64);
  const int lane = threadIdx.x % kWarp;
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const uint32_t r = row + lane / 4 + i / 2 % 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    bits |= static_cast<uint32_t>(keeps(call, head, seed, reverse ? c : r, reverse ? r : c)) << i;
  }
  return bits;
}

// Padding mask of a lane's part of COLUMNS keys: bit 2 n + e keeps column e of the n-th product.
template <int COLUMNS>
CRATE_DEVICE uint32_t key_bits(const bool* keep, int key, int length) {
  uint32_t bits = 0;
  unroll<COLUMNS / 4>([&](int i) {
    const int at = key + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    if (at < length && keep[at]) bits |= 1u << i;
  });
  return bits;
}

// exp(scale * score - base); base is the row's maximum or logsumexp. The scaled score is rounded before the difference,
// so that the largest one gives exactly 0, forward and backward. A fused multiply-add would keep its rounding error:
// for scores around ten thousand, a weight of 1.002 instead of 1. For the same reason scores are not scaled by log2(e).
CRATE_DEVICE float weight(float score, float scale, float base) {
  return exp2_fast((__fmul_rn(score, scale) - base) * 1.44269504f);
}

}  // namespace crate_kernels::mssa
