// The backward of long rows on sm_90a: symmetric, from rows alone, and so without atomics and in one order.
//
// The equations are those of whole heads (head_gradient.cuh). Full attention takes them as they are: two products for E
// and A, two sums. Where a pair has one direction, causal or with tokens that are no keys, rows walk twice: over their
// keys, and over their queries,
//
//     dw_i = sum_j scale E_ij (g^_i . w_j - d^_i) w_j  +  sum_j scale E_ij (w_i . g^_j - d^_j) w_j + E_ij g^_j
//
// where the first j are keys of i, and those of the second have i as a key. Causal, each walk ends or begins with the
// tile of the warp group's own rows; a token is its own key and its own query.
#pragma once

#include "long_gradient.cuh"

namespace crate_kernels::mssa {

template <class T_, int DIM_, bool APART_>
struct LongBackwardShape {
  using T = T_;
  static constexpr bool kApart = APART_;  // keys and queries have a walk each
  static constexpr int kDim = DIM_, kPanels = kDim / 64, kTile = 64;
  static constexpr int kGroups = kDim <= 64 ? 3 : 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = kGroups == 3 ? 160 : 232, kLoading = kGroups == 3 ? 32 : 40;
  static constexpr int kStages = 3, kAhead = 1;
  static constexpr uint32_t kPanel = kTile * kRowBytes, kTokens = kPanels * kPanel, kStage = 2 * kTokens;  // w, g^
  static constexpr uint32_t kOwnPanel = kRows * kRowBytes, kOwn = kPanels * kOwnPanel;
  // Places in shared memory, behind the stages: own w and g^, results, two numbers a token of each stage.
  static constexpr uint32_t kOwnAt = kStages * kStage, kStagingAt = kOwnAt + 2 * kOwn, kNumbers = kStagingAt + kOwn;
  static constexpr uint32_t kBarriers = kNumbers + kStages * kTile * 8;
  static constexpr uint32_t kBytes = kBarriers + 16 * kStages;
  static_assert(kDim % 64 == 0 && kDim <= 128 && kBytes <= 232448);
};

template <class T, int DIM, bool APART>
__global__ void __launch_bounds__(LongBackwardShape<T, DIM, APART>::kThreads, 1)
    long_backward_kernel(const __grid_constant__ LongCall call, int causal) {
  using S = LongBackwardShape<T, DIM, APART>;
  const int index = blockIdx.x / call.blocks, rows = blockIdx.x % call.blocks * S::kRows;
  const Head head(call, index);
  if (rows >= head.length || call.left[index] != 0) return;
  const int count = (head.length + S::kTile - 1) / S::kTile;
  const HeadPlace at = {shared_address(aligned_shared_memory()), warp_group(),
                        __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5 & 3), 0)};
  const Stages<S> stages = {at.base + S::kBarriers};
  if (threadIdx.x == 0) stages.init();
  __syncthreads();
  if (at.group == S::kGroups) {
    fewer_registers<S::kLoading>();
    // Keys, then queries: every tile twice, if not causal.
    stages.feed(APART && !causal ? 2 * count : count, [&](int n, int stage) {
      load_tile<S>(call, head, at.base, (n < count ? n : n - count) * S::kTile, stage);
    });
  } else {
    more_registers<S::kRegisters>();
    const int first = rows + 64 * at.group, place = causal ? first / S::kTile : -1;
    LongGradient<S> gradient = {call, at, count, place, call.of_head[index].x, {}, {}, {}, {}, {}};
    gradient.take(head, first);
    copy_async_wait<0>();
    fence_async_shared();
    barrier_sync(1 + at.group, 128);
    if constexpr (APART) {
      const int end = causal ? min(place + 1, count) : count;
      gradient.template walk<Walk::kKeys>(stages, 0, end, causal && place < count);
      gradient.template walk<Walk::kQueries>(stages, causal ? place : count, causal ? count : 2 * count, false);
    } else {
      gradient.template walk<Walk::kBoth>(stages, 0, count, false);
    }
    const uint32_t staging = at.base + S::kStagingAt + (4 * at.group + at.warp) * S::kPanels * 16 * kRowBytes;
    const float back = call.of_head[index].y;
    stage_rows<T, DIM>(staging, gradient.acc, back, back, at.lane());
    __syncwarp();
    store_rows<S>(call, head.first<T>(call, call.dw), call.dw.row, head.length, staging, first + 16 * at.warp,
                  at.lane());
  }
}

}  // namespace crate_kernels::mssa
