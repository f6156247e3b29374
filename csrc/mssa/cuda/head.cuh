// Heads, their keys and their dropout, for every kernel of subspace attention.
#pragma once

#include "../../common/cuda/device.cuh"
#include "../../common/cuda/philox.cuh"
#include "problem.cuh"

namespace crate_kernels::mssa {

CRATE_DEVICE const uint8_t* key_masks(const Problem& call) {
  return call.masking.key_padding_mask;
}

// One head of one sequence. CALL: any record with nheads, seqlen, total, cu_seqlens and key_masks.
struct Head {
  int sequence, head, start, length;
  uint32_t counter;  // batch * nheads + head: the head as dropout counts them
  int64_t row;       // of lse, delta and dlse, which have one number per row

  template <class CALL>
  CRATE_DEVICE Head(const CALL& call, int index) {
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
  template <class CALL>
  static CRATE_DEVICE int bound(const CALL& call, int sequence) {
    return min(max(call.cu_seqlens[sequence], 0), call.total);
  }

  // Elements before the head's first row.
  template <class CALL, class ROWS>
  CRATE_DEVICE int64_t offset(const CALL& call, const ROWS& rows) const {
    return (call.cu_seqlens != nullptr ? start * rows.row : sequence * rows.batch) + head * rows.head;
  }

  // The head's first element.
  template <class T, class CALL, class ROWS>
  CRATE_DEVICE T* first(const CALL& call, const ROWS& rows) const {
    return static_cast<T*>(rows.data) + offset(call, rows);
  }

  template <class T>
  CRATE_DEVICE View<T> view(const Problem& call, const Rows& rows) const {
    return {first<T>(call, rows), rows.row, rows.channel};
  }

  // Padding mask of the sequence; null: every token is a key.
  template <class CALL>
  CRATE_DEVICE const uint8_t* key_mask(const CALL& call) const {
    return key_masks(call) == nullptr ? nullptr : key_masks(call) + static_cast<int64_t>(sequence) * call.seqlen;
  }
};

// Tokens in a cache, and new ones that fit behind them.
struct CacheSpace {
  int cached, appended;
};

// New tokens beyond the capacity are dropped: they are never written, and no token sees them. `key_mask` is
// right-padded, so that its kept tokens come first. Every lane of a warp takes part.
CRATE_DEVICE CacheSpace space_of(const Problem& call, const Head& head) {
  const int cached = min(max(call.masking.cache_lengths[head.sequence], 0), call.capacity);
  int kept = call.seqlen;
  if (const uint8_t* const key_mask = head.key_mask(call)) {
    kept = 0;
    for (int n = threadIdx.x % kWarp; n < call.seqlen; n += kWarp) kept += key_mask[n] != 0;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) kept += __shfl_xor_sync(kAllLanes, kept, step);
  }
  return {cached, min(kept, call.capacity - cached)};
}

// The keys of a forward: the rows themselves, or the tokens of a cache.
struct Keys {
  int before, length;       // keys before the first row, and all keys
  const uint8_t* key_mask;  // null: every key

  CRATE_DEVICE Keys(const Problem& call, const Head& head) : before(0), length(head.length), key_mask(nullptr) {
    if (call.masking.cache_lengths == nullptr) {
      key_mask = head.key_mask(call);
    } else {
      const CacheSpace space = space_of(call, head);
      before = space.cached;
      length = space.cached + space.appended;
    }
  }
};

// The first row of a block. Under a mask the last rows, which see the most keys, start first: if they started last, the
// launch would wait for them.
CRATE_DEVICE int first_row(const Problem& call, int block, int rows) {
  return (hides_none(call.mask) ? block : call.blocks - 1 - block) * rows;
}

// Writes zeros to packed rows that no sequence covers; only wrong offsets leave any. Each block takes its share of the
// rows after its sequence, and of those before the first. If `numbers` is not null, its entries for these rows get
// zeros too.
CRATE_DEVICE void clear_uncovered(const Problem& call, const Head& head, int block, const Rows& to, float* numbers) {
  if (call.cu_seqlens == nullptr) return;
  const auto clear = [&](int from, int until) {
    for (int row = from + block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); row < until;
         row += call.blocks * static_cast<int>(blockDim.x)) {
      for (int c = 0; c < call.access.head_dim; ++c) {
        const int64_t at = head.head * to.head + row * to.row + c * to.channel;
        if (call.dtype == Dtype::f32) {
          static_cast<uint32_t*>(to.data)[at] = 0;
        } else {
          static_cast<uint16_t*>(to.data)[at] = 0;
        }
      }
      if (numbers != nullptr) numbers[static_cast<int64_t>(head.head) * call.total + row] = 0.0f;
    }
  };
  clear(head.start + head.length,
        head.sequence == call.sequences - 1 ? call.total : Head::bound(call, head.sequence + 1));
  if (head.sequence == 0) clear(0, head.start);
}

// The lse of a row, from its largest score and the sum of weights relative to it. With an infinite score the sum is no
// number.
CRATE_DEVICE float lse_of(float largest, float sum) {
  if (sum == 0.0f) return -INFINITY;
  return largest == INFINITY ? INFINITY : largest + logf(sum);
}

// Writes the largest score of row i, and the threshold times the sum of its weights: 1 without a key.
CRATE_DEVICE void put_statistics(const Problem& call, const Head& head, int i, float largest, float sum) {
  call.scratch.row_max[head.row + i] = largest;
  call.scratch.select_level[head.row + i] = call.threshold * (sum == 0.0f ? 1.0f : sum);
}

CRATE_DEVICE uint64_t seed_of(const Problem& call) {
  const int64_t* const seed = call.masking.seed;
  return seed == nullptr ? 0 : static_cast<uint64_t>(*seed);
}

// True if dropout keeps a weight.
CRATE_DEVICE bool keeps(const Problem& call, const Head& head, uint64_t seed, uint32_t query, uint32_t key) {
  return philox_word0(seed, key, query, head.counter) > call.drop_last;
}

}  // namespace crate_kernels::mssa
