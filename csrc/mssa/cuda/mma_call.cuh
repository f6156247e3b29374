// Heads, masks and weights of the tensor-core kernels of subspace attention.
#pragma once

#include "../../common/cuda/philox.cuh"
#include "mma_tile.cuh"
#include "problem.cuh"

namespace crate_kernels::mssa {

// One head of one sequence.
struct Head {
  int sequence, head, start, length;
  uint32_t counter;  // batch * nheads + head: the head as dropout counts them
  int64_t row;       // of lse

  CRATE_DEVICE Head(const Problem& call, int index) {
    sequence = index / call.nheads;
    head = index % call.nheads;
    counter = static_cast<uint32_t>(index);
    start = 0;
    length = call.seqlen;
    row = static_cast<int64_t>(index) * call.seqlen;
    if (call.cu_seqlens != nullptr) {
      start = bound(call, sequence);
      length = min(max(bound(call, sequence + 1) - start, 0), call.seqlen);
      row = static_cast<int64_t>(head) * call.total + start;
    }
  }

  // Offsets are checked on the CPU only; here they are clamped.
  static CRATE_DEVICE int bound(const Problem& call, int sequence) {
    return min(max(call.cu_seqlens[sequence], 0), call.total);
  }

  template <class T>
  CRATE_DEVICE View<T> view(const Problem& call, const Rows& rows) const {
    const int64_t first = call.cu_seqlens != nullptr ? start * rows.row : sequence * rows.batch;
    return {static_cast<T*>(rows.data) + first + head * rows.head, rows.row, rows.channel};
  }
};

// Writes zeros to packed rows that no sequence covers; only wrong offsets leave any. Each block takes its share of the
// rows after its sequence, and of those before the first. If `numbers` is not null, its entries for these rows get
// zeros too.
template <class T>
CRATE_DEVICE void clear_uncovered(const Problem& call, const Head& head, int block, const Rows& to, float* numbers) {
  if (call.cu_seqlens == nullptr) return;
  const bool last = head.sequence == call.sequences - 1;
  const int stop = last ? call.total : Head::bound(call, head.sequence + 1);
  const auto clear = [&](int from, int until) {
    for (int row = from + block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); row < until;
         row += call.blocks * static_cast<int>(blockDim.x)) {
      T* const at = static_cast<T*>(to.data) + head.head * to.head + row * to.row;
      for (int c = 0; c < call.access.head_dim; ++c) at[c * to.channel] = from_float<T>(0.0f);
      if (numbers != nullptr) numbers[static_cast<int64_t>(head.head) * call.total + row] = 0.0f;
    }
  };
  clear(head.start + head.length, stop);
  if (head.sequence == 0) clear(0, head.start);
}

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
    const uint32_t word = philox_word0(seed, reverse ? r : c, reverse ? c : r, head.counter);
    bits |= static_cast<uint32_t>(word > call.drop_last) << i;
  }
  return bits;
}

// Padding mask of a lane's part of COLUMNS keys: bit 2 n + e keeps column e of the n-th product.
template <int COLUMNS>
CRATE_DEVICE uint32_t key_bits(const bool* keep, int key, int length) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; ++i) {
    const int at = key + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    if (at < length && keep[at]) bits |= 1u << i;
  }
  return bits;
}

// exp(scale * score - base); base is the row's maximum or logsumexp. The scaled score is rounded before the difference,
// so that the largest one gives exactly 0, forward and backward. A fused multiply-add would keep its rounding error:
// for scores around ten thousand, a weight of 1.002 instead of 1. For the same reason scores are not scaled by log2(e).
CRATE_DEVICE float weight(float score, float scale, float base) {
  return exp2_fast((__fmul_rn(score, scale) - base) * 1.44269504f);
}

}  // namespace crate_kernels::mssa
