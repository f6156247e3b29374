// The backward of long rows on sm_90a by pairs: E and A of a tile are made once, and serve the rows of both its sides.
//
// The equations are those of long_backward.cuh. A block owns 128 rows and walks over the tiles from its own on. Own
// rows sum in registers, by E and A as they are; the tile's rows by their transposes, which go through shared memory:
//
//     dw_i += sum_j scale A_ij w_j + E_ij g^_j        dw_j += sum_i scale A_ij w_i + E_ij g^_i
//
// Seven products a pair of tiles, where rows alone take ten. Where a pair has one direction, causal or with tokens that
// are no keys, own rows are keys and the tile's are queries,
//
//     A_ij = E_ij (w_i . g^_j - d^_j)
//     dw_i += sum_j scale A_ij w_j + E_ij g^_j        dw_j += sum_i scale A_ij w_i
//
// and five products do, where rows alone take seven. Causal the walk begins with the own tiles; else it has all, and a
// block without a key has nothing to do.
//
// A tile's sums are added to fp32 in global memory, in the order in which blocks come: the last bits of dw differ from
// run to run. long_round_kernel makes dw of them.
#pragma once

#include "long_gradient.cuh"

namespace crate_kernels::mssa {

// BOTH: a pair has both directions.
template <class T_, int DIM_, bool BOTH_>
struct LongPairsShape {
  using T = T_;
  static constexpr bool kBoth = BOTH_, kApart = false;
  static constexpr int kDim = DIM_, kPanels = kDim / 64, kTile = 64, kSideChannels = kDim / 2;  // of sides
  static constexpr int kGroups = 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = 232, kLoading = 40;
  static constexpr int kStages = 3, kAhead = 1;
  static constexpr uint32_t kPanel = kTile * kRowBytes, kTokens = kPanels * kPanel, kStage = 2 * kTokens;  // w, g^
  static constexpr uint32_t kOwnPanel = kRows * kRowBytes, kOwn = kPanels * kOwnPanel, kWeights = kRows * kRowBytes;
  // Places in shared memory, behind the stages: own w and g^, A and E, two numbers a token of each stage.
  static constexpr uint32_t kOwnAt = kStages * kStage, kA = kOwnAt + 2 * kOwn, kE = kA + kWeights;
  static constexpr uint32_t kNumbers = kE + (kBoth ? kWeights : 0), kBarriers = kNumbers + kStages * kTile * 8;
  static constexpr uint32_t kBytes = kBarriers + 16 * kStages;
  static_assert(kDim % 64 == 0 && kDim <= 128 && kBytes <= 232448);
};

template <class S>
struct LongPairs : LongGradient<S> {
  using T = typename S::T;
  using Rows = LongGradient<S>;
  using Rows::kSums, Rows::kTerms, Rows::at;
  static constexpr Walk kWalk = S::kBoth ? Walk::kBoth : Walk::kQueries;
  static constexpr int kConsumers = 128 * S::kGroups;          // threads
  static constexpr int kStored = 1, kRead = 2, kOneGroup = 3;  // named barriers: of all consumers twice, of a group
  bool diagonal;                                               // the first tiles are the block's own

  // Of the pairs of own rows, which the walk meets twice, each counts once; both directions of a token with itself are
  // halves.
  CRATE_DEVICE void keep_once(float (&s)[kSums], int n) const {
    if (!diagonal || n > at.group) return;
    const int lane = at.lane(), behind = 64 * (at.group - n) + 16 * at.warp + (lane >> 2) - (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int by = behind + i % 4 / 2 * 8 - (i / 4 * 8 + i % 2);  // how far the row is behind the column
      s[i] = by > 0 ? 0.0f : S::kBoth && by == 0 ? 0.5f * s[i] : s[i];
    }
  }
  // A and E to shared memory, for the tile's rows.
  CRATE_DEVICE void put_weights() const {
    const int row = 64 * at.group + 16 * at.warp;
#pragma unroll
    for (int kk = 0; kk < kTerms; ++kk) {
      Columns<64>::put(at.base + S::kA, this->a[kk], row, 16 * kk, at.lane());
      if constexpr (S::kBoth) Columns<64>::put(at.base + S::kE, this->e[kk], row, 16 * kk, at.lane());
    }
    fence_async_shared();
  }
  // Begins the sums of the tile's rows, of half of the channels, once both warp groups have put their weights.
  CRATE_DEVICE void start_sides(float (&sides)[S::kSideChannels / 2]) const {
    const uint32_t own = at.base + S::kOwnAt + at.group * (S::kPanels == 2 ? S::kOwnPanel : 2 * S::kSideChannels);
    barrier_sync(kStored, kConsumers);
#pragma unroll
    for (int kk = 0; kk < S::kRows / 16; ++kk) {
      const uint64_t w = advance(matrix_descriptor(own, 0, 1024), 2048 * kk);
      using Product = Wgmma<T, S::kSideChannels>;
      Product::template ss<true, true>(sides, Columns<64>::descriptor(at.base + S::kA, 16 * kk), w, kk > 0);
      if constexpr (S::kBoth) {
        const uint64_t e = Columns<64>::descriptor(at.base + S::kE, 16 * kk);
        Product::template ss<true, true>(sides, e, advance(w, S::kOwn), true);
      }
    }
    wgmma_commit();
  }
  CRATE_DEVICE void add_sides(const float (&sides)[S::kSideChannels / 2], float* to) const {
    barrier_sync(kRead, kConsumers);  // other weights may be put
    add<S::kSideChannels>(sides, to + at.group * (S::kSideChannels * 64));
  }
  // Adds sums of 64 rows to those at `to`.
  template <int CHANNELS>
  static CRATE_DEVICE void add(const float (&sums)[CHANNELS / 2], float* to) {
    to += (fresh(threadIdx.x) & 127) * 4;
#pragma unroll
    for (int i = 0; i < CHANNELS / 8; ++i) {
      add_global_4(to + i * 512, sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }

  // Adds `tiles` tiles; `to` is where the sums of the first begin.
  CRATE_DEVICE void walk(const Stages<S>& stages, int tiles, float* to) {
    float s[kSums], t[kSums], sides[S::kSideChannels / 2];  // (64, kTile) twice, (kTile, kSideChannels) per warp group
    stages.wait_full(0);
    this->start_scores(s, 0);
    wgmma_wait<0>();
    pin(s);
    this->template start_products<kWalk>(t, 0);
    this->template weigh<kWalk>(s, 0);
    keep_once(s, 0);
    wgmma_wait<0>();
    pin(t);
    this->template multiply<kWalk>(s, t);
    this->template pack<kWalk>(s, t);
#pragma unroll 1
    for (int n = 1; n < tiles; ++n) {
      put_weights();
      stages.wait_full(n);
      this->template start<kWalk>(s, t, n);
      this->template start_sums<kWalk>(n - 1);
      start_sides(sides);
      wgmma_wait<3>();
      pin(s);
      this->template weigh<kWalk>(s, n);
      keep_once(s, n);
      wgmma_wait<2>();
      pin(t);
      this->template multiply<kWalk>(s, t);
      this->template wait_for_sums<1>();
      stages.release(n - 1);
      this->template pack<kWalk>(s, t);
      wgmma_wait<0>();
      pin(sides);
      add_sides(sides, to);
      to += 64 * S::kDim;
    }
    put_weights();
    this->template start_sums<kWalk>(tiles - 1);
    start_sides(sides);
    this->wait_for_sums();
    pin(sides);
    add_sides(sides, to);
  }
};

template <class T, int DIM, bool BOTH>
__global__ void __launch_bounds__(LongPairsShape<T, DIM, BOTH>::kThreads, 1)
    long_pairs_kernel(const __grid_constant__ LongCall call, int causal) {
  using S = LongPairsShape<T, DIM, BOTH>;
  const int index = blockIdx.x / call.blocks, rows = blockIdx.x % call.blocks * S::kRows;
  const Head head(call, index);
  if (rows >= head.length || call.left[index] != 0) return;
  if (const uint8_t* const key_mask = head.key_mask(call)) {
    const int row = rows + static_cast<int>(threadIdx.x);
    if (__syncthreads_count(threadIdx.x < S::kRows && row < head.length && key_mask[row]) == 0) return;
  }
  const bool diagonal = BOTH || causal;
  const int from = diagonal ? rows / S::kTile : 0, tiles = (head.length + S::kTile - 1) / S::kTile - from;
  const HeadPlace at = {shared_address(aligned_shared_memory()), warp_group(),
                        __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5 & 3), 0)};
  const Stages<S> stages = {at.base + S::kBarriers};
  if (threadIdx.x == 0) stages.init();
  __syncthreads();
  if (at.group == S::kGroups) {
    fewer_registers<S::kLoading>();
    stages.feed(tiles, [&](int n, int stage) { load_tile<S>(call, head, at.base, (from + n) * S::kTile, stage); });
  } else {
    more_registers<S::kRegisters>();
    const int first = rows + 64 * at.group;
    LongPairs<S> pairs = {{call, at, tiles, -1, call.of_head[index].x, {}, {}, {}, {}, {}}, diagonal};
    pairs.take(head, first);
    copy_async_wait<0>();
    fence_async_shared();
    barrier_sync(LongPairs<S>::kOneGroup + at.group, 128);
    pairs.walk(stages, tiles, call.sums_of(head, from, S::kDim));
    if (first < head.length) pairs.template add<S::kDim>(pairs.acc, call.sums_of(head, first / S::kTile, S::kDim));
  }
}

// dw of 64 rows, from their sums.
template <class T, int DIM>
__global__ void __launch_bounds__(128) long_round_kernel(const __grid_constant__ LongCall call) {
  using S = LongPairsShape<T, DIM, true>;
  const int tiles = (call.seqlen + S::kTile - 1) / S::kTile, index = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const Head head(call, index);
  if (tile * S::kTile >= head.length || call.left[index] != 0) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float4* const sums = reinterpret_cast<const float4*>(call.sums_of(head, tile, DIM)) + threadIdx.x;
  float acc[DIM / 2];  // (64, DIM) per block
#pragma unroll
  for (int i = 0; i < DIM / 8; ++i) {
    const float4 four = sums[i * 128];
    acc[4 * i] = four.x, acc[4 * i + 1] = four.y, acc[4 * i + 2] = four.z, acc[4 * i + 3] = four.w;
  }
  const uint32_t staging = shared_address(aligned_shared_memory()) + warp * S::kPanels * 16 * kRowBytes;
  const float back = call.of_head[index].y;
  stage_rows<T, DIM>(staging, acc, back, back, lane);
  __syncwarp();
  store_rows<S>(call, head.first<T>(call, call.dw), call.dw.row, head.length, staging, tile * S::kTile + 16 * warp,
                lane);
}

}  // namespace crate_kernels::mssa
