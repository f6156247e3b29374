// Rows longer than a block's shared memory holds, on sm_90a: what their forward and backward share.
//
// A block owns some rows of a head, 64 for each of its warp groups, and walks over the tokens by tiles. One more warp
// group loads these, some stages ahead: barriers in shared memory say that a stage is full, or may be filled again.
#pragma once

#include "head_tokens.cuh"

namespace crate_kernels::mssa {

constexpr int kLongTile = 128;  // tokens that are measured together

struct LongCall : HeadCall {
  HeadTokens scaled;  // g^, of the backward
  float2* numbers;    // two a token, laid out as lse. Forward: norm, largest norm so far; backward: d^, is a key or not
  float2* of_head;    // (heads,): c, and what undoes the factor of g
  float* tile_stats;  // for each tile of 128 tokens
  float* sums;        // fp32, of tiles of 64 rows, as fragments of products; null: none, long_pairs.cuh
  int32_t blocks;     // of rows, per head
  int32_t sum_tiles;  // per head; packed, of all sequences

  // The sums of a head's tile.
  CRATE_DEVICE float* sums_of(const Head& of, int tile, int dim) const {
    int64_t at = static_cast<int64_t>(cu_seqlens == nullptr ? of.counter : of.head) * sum_tiles + tile;
    if (cu_seqlens != nullptr) at += of.start / 64 + of.sequence;  // a sequence may begin within a tile
    return sums + at * (64 * dim);
  }
};

// What load_tokens copies for a warp group: rows of the shape's tokens.
template <class S, int ROWS, uint32_t PANEL>
struct Copied {
  using T = typename S::T;
  static constexpr int kRows = ROWS, kThreads = 128, kPanels = S::kPanels;
  static constexpr uint32_t kPanel = PANEL;
};

// A block's warp groups are distinguished, and their warps, without a branch for each lane.
CRATE_DEVICE int warp_group() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 7), 0);
}

// The barriers of S::kStages stages, behind one another: full, then empty.
template <class S>
struct Stages {
  static constexpr uint32_t kBytes = 16 * S::kStages;
  uint32_t barriers;

  // By one thread, before a barrier of the block.
  CRATE_DEVICE void init() const {
#pragma unroll
    for (int n = 0; n < S::kStages; ++n) {
      mbarrier_init(barriers + 8 * n, 4);  // the warps that load
      mbarrier_init(barriers + 8 * (S::kStages + n), 4 * S::kGroups);
    }
    mbarrier_init_fence();
  }
  CRATE_DEVICE void wait_full(int tile) const {
    mbarrier_wait(barriers + 8 * (tile % S::kStages), tile / S::kStages & 1);
  }
  // A warp has read a tile, and its products are done.
  CRATE_DEVICE void release(int tile) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(barriers + 8 * (S::kStages + tile % S::kStages));
  }
  // The loading warp group: load(tile, stage) begins the copies of a tile.
  template <class F>
  CRATE_DEVICE void feed(int tiles, const F& load) const {
#pragma unroll 1
    for (int n = 0; n < tiles + S::kAhead; ++n) {
      if (n < tiles) {
        mbarrier_wait(barriers + 8 * (S::kStages + n % S::kStages), (n / S::kStages & 1) ^ 1);
        load(n, n % S::kStages);
      }
      copy_async_commit();
      if (n < S::kAhead) continue;
      copy_async_wait<S::kAhead>();
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) mbarrier_arrive(barriers + 8 * ((n - S::kAhead) % S::kStages));
    }
    copy_async_wait<0>();
  }
};

}  // namespace crate_kernels::mssa
