// What the tensor-core kernels of subspace attention are told, and where a block of theirs is.
#pragma once

#include "../../common/cuda/philox.cuh"
#include "mma_tile.cuh"

namespace crate_kernels::mssa {

// The strides of a tensor in elements; of a packed one, tokens are rows and `batch` is not used.
struct Strides {
  int64_t batch, head, row, channel;
};

struct Call {
  const void *w, *out, *g;  // g: the gradient of out, or null
  const void* keys;         // of the forward: w, or a cache to which w was appended
  void* to;                 // out in the forward, the gradient of w in the backward
  Strides w_strides, out_strides, g_strides, key_strides, to_strides;
  float* lse;         // (heads, rows), or (nheads, total) of packed sequences; so are dlse and shift; null if unwanted
  const float* dlse;  // null without
  float* shift;
  const bool* keep;                      // (batch, seqlen), null without padding
  const int32_t* held;                   // null, or the tokens of a cache before the new ones; then keep is of those
  const int32_t* cu_seqlens;             // (sequences + 1,), null unless packed
  const int64_t* seed;                   // null without dropout
  int sequences, nheads, seqlen, total;  // seqlen: of every sequence, or of the longest packed one
  int capacity;                          // of the cache
  int blocks;                            // of a head
  Access access;
  float scale, threshold, keep_factor;
  uint32_t drop_last;   // the largest word that is dropped
  bool causal, select;  // select: phi = "threshold"
};

// One head of one sequence.
struct Head {
  int sequence, head, start, length;
  uint32_t counter;  // batch * nheads + head: the head as dropout counts them
  int64_t row;       // of lse

  CRATE_DEVICE Head(const Call& call, int index) {
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
  static CRATE_DEVICE int bound(const Call& call, int sequence) {
    return min(max(call.cu_seqlens[sequence], 0), call.total);
  }

  template <class T>
  CRATE_DEVICE View<T> view(T* data, const Call& call, const Strides& strides) const {
    const int64_t first = call.cu_seqlens != nullptr ? start * strides.row : sequence * strides.batch;
    return {data + first + head * strides.head, strides.row, strides.channel};
  }
};

// Writes zeros where no sequence is: `block` of `blocks` blocks to its share of the rows after a sequence, and before
// the first. There are none where the offsets are as they should be. `numbers`, where given, gets them too.
template <class T>
CRATE_DEVICE void clear_uncovered(const Call& call, const Head& head, int block, int blocks, T* to, float* numbers) {
  if (call.cu_seqlens == nullptr) return;
  const bool last = head.sequence == call.sequences - 1;
  const int stop = last ? call.total : Head::bound(call, head.sequence + 1);
  const auto clear = [&](int from, int until) {
    for (int row = from + block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); row < until;
         row += blocks * static_cast<int>(blockDim.x)) {
      T* const at = to + head.head * call.to_strides.head + row * call.to_strides.row;
      for (int c = 0; c < call.access.head_dim; ++c) at[c * call.to_strides.channel] = from_float<T>(0.0f);
      if (numbers != nullptr) numbers[static_cast<int64_t>(head.head) * call.total + row] = 0.0f;
    }
  };
  clear(head.start + head.length, stop);
  if (head.sequence == 0) clear(0, head.start);
}

// Which weights of 16 rows and COLUMNS columns dropout keeps: bit 4 n + e is for element e of the n-th product of 8
// columns. Rows are queries and columns keys, or the reverse. Not unrolled: the words alone are 100 instructions each.
template <int COLUMNS>
CRATE_DEVICE uint32_t kept_bits(uint64_t seed, const Call& call, const Head& head, int row, int column, bool reverse) {
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

// Which of COLUMNS keys padding keeps, of those that a lane has: bit 2 n + e is for column e of the n-th product.
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

// e^x of a score less its row's maximum or logsumexp. The scaled score is rounded before the difference: that of the
// largest is then 0, forward and back, where a fused multiply-add leaves what was rounded, and a weight of 1 would be
// 1.002 of scores in ten thousands. For the same reason scores are not scaled by log2(e).
CRATE_DEVICE float weight(float score, float scale, float base) {
  return exp2_fast((__fmul_rn(score, scale) - base) * 1.44269504f);
}

}  // namespace crate_kernels::mssa
