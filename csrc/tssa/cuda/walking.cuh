// The causal form for sizes that the compiler knows, on sm_90a: clusters that walk through one sequence after another.
// A step is of p.chunk_size tokens a block, which lie in shared memory from the first sum to the last result; those of
// the next step come meanwhile, if it holds both.
//
// A thread has one vector of 8 channels of p.chunk_size / kGroups tokens, which follow one another. It adds up its own
// tokens; what is before or behind them is added by channel: the sequence so far, in fp64, then the cluster's blocks in
// the order of their ranks, then the block's groups. So the order of every sum depends on the sizes of a step alone,
// and what is before a token on no later one. Sums of squares are in the scale in which their reciprocals are normal
// numbers.
#pragma once

#include "persistent_steps.cuh"

namespace crate_kernels {

constexpr float kWalkScale = 9.094947e-13f;  // 2^-40

// A cluster's steps, sequence after sequence. BACK: backwards from the last one; where the forward saved no sums,
// forwards to the last but one before, with negative numbers.
template <class S, bool BACK>
struct TssaSteps {
  const TssaProblem& p;
  int index, number, count;  // the sequence; the step, of how many in a direction

  CRATE_DEVICE explicit TssaSteps(const TssaProblem& p) : p(p) {
    index = static_cast<int>(blockIdx.x) / S::kCluster;
    start();
  }
  CRATE_DEVICE void start() {
    number = count = 0;
    if (!there()) return;
    const int stride = S::kCluster * p.chunk_size;
    count = max((sequence_of(p, index).count + stride - 1) / stride, 1);
    if (BACK && p.sums_every == 0) number = 1 - count;
  }
  CRATE_DEVICE bool there() const { return index < p.nsequences; }
  CRATE_DEVICE void next() {
    if (++number < count || !there()) return;
    index += static_cast<int>(gridDim.x) / S::kCluster;
    start();
  }
  // Steps of the sequence before this one.
  CRATE_DEVICE int before() const { return BACK ? count - 1 - abs(number) : number; }
  // The block's tokens.
  CRATE_DEVICE TssaSpan span() const {
    TssaSpan s = sequence_of(p, index);
    cut(s, before() * S::kCluster + cluster_rank(), p.chunk_size);
    return s;
  }
};

// Calls body(steps, buffer, phase) for each step of the cluster, as each_sequence for each sequence.
template <class S, bool BACK, class Fetch, class Body>
CRATE_DEVICE void each_step(const TssaProblem& p, const Fetch& fetch, Body body) {
  TssaSteps<S, BACK> now(p), ahead(p);
  if (threadIdx.x == 0) {
    for (int n = 0; n < S::kBuffers; ++n) mbarrier_init(fetch.barrier(n), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  fetch(ahead, 0);
#pragma unroll 1
  for (int trip = 0; now.there(); ++trip, now.next()) {
    const int buffer = trip % S::kBuffers;
    ahead.next();
    if constexpr (S::kBuffers == 2) fetch(ahead, 1 - buffer);
    body(now, buffer, static_cast<uint32_t>(trip / S::kBuffers & 1));
    __syncthreads();  // now the buffer may be filled again
    if constexpr (S::kBuffers == 1) fetch(ahead, 0);
  }
  cluster_sync();  // peers have read this block's sums
}

// The tokens of a thread's group: `count`, from the block's `first`.
template <class S>
struct TssaGroup {
  int first, count;

  CRATE_DEVICE TssaGroup(const TssaProblem& p, const TssaVectorOf<S>& v, int rows) {
    const int rows_each = p.chunk_size / S::kGroups;
    first = v.group * rows_each, count = max(min(rows - first, rows_each), 0);
  }
};

// The address of a thread's vector of its group's first token.
template <class S>
CRATE_DEVICE uint32_t first_of(const TssaVectorOf<S>& v, const TssaLayout<S>& layout, uint32_t tokens, int first) {
  return tokens + 2 * (v.head * layout.head + v.channel + first * layout.token);
}

// The sums before the steps of a backward but the first, as a forward saves them: Pi w^2 and Pi, then w^2.
template <class S>
CRATE_DEVICE int64_t step_sums_place(const TssaProblem& p, int index, int stride, int number) {
  const int max_places = (p.seqlen - 1) / stride;
  return (static_cast<int64_t>(index) * max_places + number) * (S::kSums + S::kWidth);
}

// Adds a step's `sum` to what is carried of four channels, and returns what was carried with `some` of the step.
CRATE_DEVICE float4 carried(double* carry, float4 some, float4 sum, bool start) {
  const float parts[4] = {some.x, some.y, some.z, some.w}, sums[4] = {sum.x, sum.y, sum.z, sum.w};
  float found[4];  // (4 columns,) per thread
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const double wide = start ? 0.0 : carry[j];
    found[j] = static_cast<float>(wide + static_cast<double>(parts[j]));
    carry[j] = wide + static_cast<double>(sums[j]);
  }
  return make_float4(found[0], found[1], found[2], found[3]);
}

// Turns the groups' sums, of which `own` is the block's, into those of all that is before each group. `carry` has the
// sequence's sums up to the step, and then those up to its end.
template <class S, int COUNT>
CRATE_DEVICE void before_groups(const float* own, double* carry, float* groups, bool start) {
  const int rank = cluster_rank();
  each_four<S, COUNT>([&](int i) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), before = sum;
#pragma unroll
    for (int r = 0; r < S::kCluster; ++r) {
      if (r == rank) before = sum;
      sum = plus(sum, cluster_read_4(own + i, r));
    }
    before = carried(carry + i, before, sum, start);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const float4 next = plus(before, four_at(groups + g * S::kSums + i));
      put_four(groups + g * S::kSums + i, before);
      before = next;
    }
  });
}

// Calls take(token, first head of the lane, own) for every token of the block: each_slice of persistent.cuh, at once.
template <class S, class Take>
CRATE_DEVICE void each_row(int rows, Take take) {
  const int lane = static_cast<int>(threadIdx.x) % S::kLanes;
#pragma unroll 1
  for (int i = threadIdx.x; i < (rows * S::kLanes + 31) / 32 * 32; i += S::kThreads) {
    const int slot = i / S::kLanes, row = min(slot, rows - 1);
    take(row, lane * S::kOfLane, slot == row);
  }
}

}  // namespace crate_kernels
