// A head's tokens, for the kernels that keep all of them in shared memory: where they are, loading and storing them.
#pragma once

#include "head.cuh"
#include "hopper_tile.cuh"

namespace crate_kernels::mssa {

// Strides in elements; channels are consecutive, and rows begin at multiples of 16 bytes.
struct HeadTokens {
  void* data;
  int64_t batch, head, row;
};

struct HeadCall {
  HeadTokens w, dout, out, dw;
  float* lse;                       // (batch, nheads, seqlen), packed (nheads, total); the forward writes it
  const float* dlse;                // the same; null: no gradient
  const uint8_t* key_padding_mask;  // (batch, seqlen); null: every token is a key
  const int32_t* cu_seqlens;        // (batch + 1,); null: not packed
  int32_t* left;  // for every head: how many of its last tokens are left to other kernels, mma_left.cuh
  int32_t heads, nheads, seqlen, total, head_dim;  // heads: batch * nheads
  float scale, factor;                             // factor: scale in bits, scale log2(e)
};

CRATE_DEVICE const uint8_t* key_masks(const HeadCall& call) {
  return call.key_padding_mask;
}

constexpr float kLog2E = 1.44269504f;
constexpr int kAllThreads = 1;  // named barrier

// The range of a forward by one shift a row: weights are at most 2^kTop, but for rounding, and sums at least kMinSum.
// fp16 holds weights from 2^-24 on: 256 errors of half of that are an eighth of its rounding of kMinSum. Long tokens
// have large roundings, and weights far above 2^kTop: of a sum below kMaxSum and tokens whose squares are finite, out
// is. An lse of kFarthest at most is off by a quarter of a weight's rounding; a larger one has to be that of the
// backward's own scores.
template <class T>
struct ForwardRange {
  static constexpr bool kHalf = std::is_same_v<T, fp16>;
  static constexpr float kTop = kHalf ? 14.0f : 40.0f, kMinSum = kHalf ? 0x1p-3f : 0x1p-80f, kMaxSum = 0x1p63f;
  static constexpr float kFarthest = kHalf ? 700.0f : 5600.0f;

  // Returns whether a row's sum of rounded weights, and its lse, are in range.
  static CRATE_DEVICE bool holds(float total, float lse, float minimum = kMinSum) {
    return total >= minimum && total < kMaxSum && fabsf(lse) <= kFarthest;
  }
};

// The range of a symmetric backward (head_gradient.cuh): E is at most 2^kTop, lse spreads by at most kSpread bits and
// is at most kFarthest from 0; |g| in fp16 is kLargest at most, by a power of two for each head.
template <class T>
struct BackwardRange {
  static constexpr bool kHalf = std::is_same_v<T, fp16>;
  static constexpr float kTop = kHalf ? 10.0f : 60.0f, kSpread = kHalf ? 20.0f : 150.0f, kLargest = 16.0f;

  // Returns whether lse of a head, between two numbers of bits, is in range; a NaN or an infinite one is not.
  static CRATE_DEVICE bool holds(float minimum, float maximum, float spread = kSpread) {
    return maximum - minimum <= spread && fmaxf(maximum, -minimum) <= ForwardRange<T>::kFarthest * kLog2E;
  }
  // The |g| whose factor a gradient of lse needs: it is in A, which may be 2^8 times as large.
  static CRATE_DEVICE float as_g(float dlse, float scale) { return 0x1p-8f * fabsf(scale * dlse); }
  // The factor, a power of two, that makes `maximum` about kLargest; 1 if it is 0 or not finite.
  static CRATE_DEVICE float unit(float maximum) {
    const uint32_t exponent = __float_as_uint(maximum) & 0x7f800000u;
    if (maximum == 0.0f || exponent == 0x7f800000u) return 1.0f;
    return kLargest * __uint_as_float(0x7f000000u - exponent);
  }
};

// The bits of 32 tokens up to one of them.
CRATE_DEVICE uint32_t bits_up_to(int token) {
  return token < 0 ? 0 : token > 31 ? ~0u : 2 * (1u << token) - 1;
}

// Where the block's shared memory begins, and a thread's place. The lane is asked for where it is used, and what
// follows from it computed there: registers are few.
struct HeadPlace {
  uint32_t base;
  int group, warp;
  CRATE_DEVICE int lane() const { return fresh(threadIdx.x) & 31; }
};

// Copies S::kRows tokens of a head from `first` on, or those that `key_mask` has, by S::kThreads threads; the others,
// rows beyond the length and channels beyond head_dim are 0.
template <class S, int UNROLL = 1>
CRATE_DEVICE void load_tokens(const HeadCall& call, const Head& head, const HeadTokens& tokens, uint32_t to,
                              const uint8_t* key_mask = nullptr, int first = 0, int id = fresh(threadIdx.x)) {
  using T = typename S::T;
  constexpr int kStep = S::kThreads / 8;
  static_assert(kStep % 8 == 0, "a thread's chunk has the same place in every row of its own");
  const int chunk = id & 7;
  const T* from = head.first<const T>(call, tokens) + (first + (id >> 3)) * tokens.row + 8 * chunk;
  to += chunk_at(id >> 3, chunk);
#pragma unroll UNROLL
  for (int n = 0; n < (S::kRows + kStep - 1) / kStep; ++n) {
    const int of_these = n * kStep + (id >> 3), row = first + of_these;
    if (S::kRows % kStep != 0 && of_these >= S::kRows) break;
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      const bool there = row < head.length && 64 * panel + 8 * chunk < call.head_dim;
      copy_async_16(to + panel * S::kPanel, from + 64 * panel, there && (key_mask == nullptr || key_mask[row]));
    }
    from += kStep * tokens.row, to += kStep * kRowBytes;
  }
}

// Stores a warp's 16 rows from `first` on of a head that begins at `to`; it has staged them by stage_rows.
template <class S>
CRATE_DEVICE void store_rows(const HeadCall& call, typename S::T* to, int64_t pitch, int length, uint32_t staged,
                             int first, int lane) {
  const int chunk = lane & 7;
  to += (first + (lane >> 3)) * pitch + 8 * chunk;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row = 4 * n + (lane >> 3);
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      if (first + row < length && 64 * panel + 8 * chunk < call.head_dim) {
        *reinterpret_cast<uint4*>(to + 64 * panel) =
            load_shared_4(staged + panel * 16 * kRowBytes + chunk_at(row, chunk));
      }
    }
    to += 4 * pitch;
  }
}

}  // namespace crate_kernels::mssa
