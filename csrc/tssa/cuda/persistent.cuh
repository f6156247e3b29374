// The full form for sizes that the compiler knows, on sm_90a: clusters that stay on their multiprocessors and take one
// sequence after another. As in full.cuh a cluster has the tokens of a sequence in shared memory, but here they come by
// bulk copies, those of the next sequence while one is computed if shared memory holds both.
//
// A thread has one vector of 8 channels, of every kGroups-th token of its block, in every pass. Its sums over tokens
// stay in registers. Sums over channels are one number a vector, put down and added up by head for a few tokens at a
// time. The order of every sum is fixed, and depends on the sizes alone.
//
// Clusters that share a long sequence, TOGETHER of them, add up their sums in global memory, behind a barrier of their
// own. It needs all of their blocks on the GPU at once.
#pragma once

#include "../../common/cuda/cluster.cuh"
#include "../../common/cuda/hopper.cuh"
#include "full_steps.cuh"

namespace crate_kernels {

// BUFFERS: sequences in shared memory at a time. MASKED: the call has a padding mask. TOGETHER: clusters that share a
// sequence.
template <class T_, int HEADS, int HEAD_DIM, int CLUSTER, int THREADS, int BUFFERS, bool MASKED, int TOGETHER = 1>
struct TssaSizes {
  using T = T_;
  static constexpr int kHeads = HEADS, kHeadDim = HEAD_DIM, kCluster = CLUSTER, kThreads = THREADS, kBuffers = BUFFERS;
  static constexpr bool kMasked = MASKED;
  static constexpr int kTogether = TOGETHER, kBlocks = CLUSTER * TOGETHER;  // of a sequence
  static constexpr int kWidth = HEADS * HEAD_DIM, kVectors = kWidth / 8, kPerHead = HEAD_DIM / 8;
  static constexpr int kGroups = THREADS / kVectors;
  static constexpr int kLanes = HEADS % 4 == 0 ? 4 : 2 - HEADS % 2, kOfLane = HEADS / kLanes;  // of the softmax
  static constexpr int kSums = (kWidth + HEADS + 3) / 4 * 4;  // by channel, then by head
  static constexpr int kRow = kVectors + 4;                   // numbers of a token, one a vector
  static constexpr int kSlice = 32;                           // tokens whose numbers are put down at a time
  static_assert(HEAD_DIM % 16 == 0 && THREADS % kVectors == 0 && THREADS % kWarp == 0 && kVectors >= kPerHead);
};

// Places in the block's shared memory, in floats; `share` tokens a block at most. persistent.py has the same.
template <class S, bool BACKWARD>
struct TssaPersistentShared {
  static constexpr int kCopies = BACKWARD ? 2 : 1;
  static constexpr int kFirst = 4, kSecond = kFirst + S::kSums, kChannels = kSecond + S::kSums;
  static constexpr int kHeads = kChannels + kCopies * S::kWidth, kStatistics = kHeads + (S::kHeads + 3) / 4 * 4;
  static constexpr int kTokens = kStatistics + (BACKWARD ? 2 * S::kBuffers * S::kWidth : 0);
  int size, by_head;                          // of a tensor's tokens; of numbers by head
  int members, dlogit, key_weights, scratch;  // members, dlogit: (share, kHeads); key_weights: (share,)

  CRATE_DEVICE explicit TssaPersistentShared(int share) {
    const auto four = [](int n) { return (n + 3) / 4 * 4; };
    by_head = four(share * S::kHeads);
    size = share * S::kWidth / 2;
    members = kTokens + S::kBuffers * kCopies * size;
    dlogit = members + (BACKWARD ? S::kBuffers * by_head : 0);
    key_weights = dlogit + by_head;
    scratch = key_weights + four(share);
  }
};

// The vector of a thread, in all passes.
template <class S>
struct TssaVectorOf {
  int vector, group, head, channel;  // channel: of the head

  CRATE_DEVICE TssaVectorOf() {
    vector = static_cast<int>(threadIdx.x) % S::kVectors, group = static_cast<int>(threadIdx.x) / S::kVectors;
    head = vector / S::kPerHead, channel = (vector - head * S::kPerHead) * 8;
  }
  CRATE_DEVICE int column() const { return 8 * vector; }
};

// How tokens lie in shared memory, in elements: all heads of a token together, as copied at once where they are so in
// memory, or all tokens of a head together.
template <class S>
struct TssaLayout {
  int head, token;

  CRATE_DEVICE TssaLayout(const TssaTokens& t, int share) {
    const bool together = t.head == S::kHeadDim;
    head = together ? S::kHeadDim : share * S::kHeadDim, token = together ? S::kWidth : S::kHeadDim;
  }
};

// The share of a block.
template <class S>
CRATE_DEVICE TssaSpan span_of(const TssaProblem& p, int index) {
  TssaSpan s = sequence_of(p, index);
  const int rank = static_cast<int>(blockIdx.x) / S::kCluster % S::kTogether * S::kCluster + cluster_rank();
  cut(s, rank, (s.count + S::kBlocks - 1) / S::kBlocks);
  return s;
}

// Copies a block's tokens to `to`; their bytes count for the barrier, which expects them.
template <class S>
CRATE_DEVICE void bulk_tokens(const TssaProblem& p, const TssaTokens& t, const TssaSpan& s, const TssaLayout<S>& layout,
                              uint32_t to, uint32_t barrier) {
  constexpr int kBytes = 2, kThreads = S::kThreads;
  const int rows = s.rows(), thread = static_cast<int>(threadIdx.x);
  if (rows == 0) return;
  const char* const from = part_of(p, t, s).data;
  if (layout.head == S::kHeadDim) {
    if (t.token == S::kWidth) {
      if (thread == 0) bulk_load(to, from, rows * S::kWidth * kBytes, barrier);
    } else {
      for (int n = thread; n < rows; n += kThreads)
        bulk_load(to + n * S::kWidth * kBytes, from + n * t.token * kBytes, S::kWidth * kBytes, barrier);
    }
  } else {
    for (int h = thread; h < S::kHeads; h += kThreads)
      bulk_load(to + h * layout.head * kBytes, from + h * t.head * kBytes, rows * S::kHeadDim * kBytes, barrier);
  }
}

// Fetches a sequence's tokens into a buffer; all threads of the block call it, and then wait.
template <class S>
struct TssaFetch {
  using Shared = TssaPersistentShared<S, false>;
  const TssaForward& f;
  TssaLayout<S> layout;
  uint32_t base;  // of shared memory
  int size;

  CRATE_DEVICE uint32_t tokens(int buffer) const { return base + 4 * (Shared::kTokens + buffer * size); }
  CRATE_DEVICE uint32_t barrier(int buffer) const { return base + 8 * buffer; }

  CRATE_DEVICE void operator()(int index, int buffer) const {
    if (index >= f.problem.nsequences) return;
    const TssaSpan s = span_of<S>(f.problem, index);
    if (threadIdx.x == 0) mbarrier_expect(barrier(buffer), s.rows() * S::kWidth * 2);
    bulk_tokens<S>(f.problem, f.w, s, layout, tokens(buffer), barrier(buffer));
  }
  CRATE_DEVICE void wait(int buffer, uint32_t phase) const { mbarrier_wait(barrier(buffer), phase); }
};

// Calls body(index, buffer, phase) for each sequence of the cluster, with its tokens on the way to a buffer, whose
// barrier ends this phase then.
template <class S, class Fetch, class Body>
CRATE_DEVICE void each_sequence(const TssaProblem& p, const Fetch& fetch, Body body) {
  const int stride = static_cast<int>(gridDim.x) / S::kBlocks;
  int index = static_cast<int>(blockIdx.x) / S::kBlocks;
  if (threadIdx.x == 0) {
    for (int n = 0; n < S::kBuffers; ++n) mbarrier_init(fetch.barrier(n), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  fetch(index, 0);
#pragma unroll 1
  for (int trip = 0; index < p.nsequences; ++trip, index += stride) {
    const int buffer = trip % S::kBuffers;
    if constexpr (S::kBuffers == 2) fetch(index + stride, 1 - buffer);
    body(index, buffer, static_cast<uint32_t>(trip / S::kBuffers & 1));
    __syncthreads();  // now the buffer may be filled again
    if constexpr (S::kBuffers == 1) fetch(index + stride, 0);
  }
  cluster_sync();  // peers have read this block's sums
}

}  // namespace crate_kernels
