// The forward of long rows on sm_90a.
//
// The equations are those of whole heads (head_output.cuh): one shift a row, which bounds every score of it, and so no
// running maximum. A first kernel measures the tokens; the second has the shifts before any score. Its warp groups take
// turns: while one multiplies, the others weigh. A head of which a row's sum is out of range is noted, causal from that
// row on, and left to other kernels.
#pragma once

#include "long_rows.cuh"

namespace crate_kernels::mssa {

// Writes half the score of every token with itself, in bits, and beside it the largest of the keys up to it in its
// tile; the largest of each tile; and that nothing is left.
template <class T, int DIM>
__global__ void __launch_bounds__(kLongTile) long_measure_kernel(const __grid_constant__ LongCall call) {
  __shared__ float squares[kLongTile], of_warp[kLongTile / kWarp];  // by token; by warp
  const int tiles = (call.seqlen + kLongTile - 1) / kLongTile;
  const int index = blockIdx.x / tiles, tile = blockIdx.x % tiles, id = threadIdx.x, chunk = id & 7;
  if (tile == 0 && id == 0) call.left[index] = 0;
  const Head head(call, index);
  const int first = tile * kLongTile;
  if (first >= head.length) return;
  const T* const w = head.first<const T>(call, call.w);
  for (int row = id >> 3; row < kLongTile; row += kLongTile / 8) {
    float sum = 0.0f;
#pragma unroll
    for (int panel = 0; panel < DIM / 64; ++panel) {
      const int channel = 64 * panel + 8 * chunk;
      if (first + row >= head.length || channel >= call.head_dim) continue;
      const uint4 bits = *reinterpret_cast<const uint4*>(w + (first + row) * call.w.row + channel);
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
      unroll<4>([&](int i) {
        const float2 pair = unpack_pair<T>(pairs[i]);
        sum += pair.x * pair.x + pair.y * pair.y;
      });
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (chunk == 0) squares[row] = sum;
  }
  __syncthreads();
  const int row = first + id, lane = id % kWarp, warp = id / kWarp;
  const uint8_t* const key_mask = head.key_mask(call);
  const float norm = 0.5f * call.factor * squares[id];
  float up_to = row < head.length && (key_mask == nullptr || key_mask[row]) ? norm : -INFINITY;
#pragma unroll
  for (int step = 1; step < static_cast<int>(kWarp); step *= 2) {
    const float before = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to = fmaxf(up_to, before);
  }
  if (lane == static_cast<int>(kWarp) - 1) of_warp[warp] = up_to;
  __syncthreads();
  for (int n = 0; n < warp; ++n) up_to = fmaxf(up_to, of_warp[n]);
  if (row < head.length) call.numbers[head.row + row] = make_float2(norm, up_to);
  if (id == kLongTile - 1) call.tile_stats[static_cast<int64_t>(index) * tiles + tile] = up_to;
}

template <class T_, int DIM_, bool CAUSAL_>
struct LongForwardShape {
  using T = T_;
  static constexpr bool kCausal = CAUSAL_;
  static constexpr int kDim = DIM_, kPanels = kDim / 64, kTile = kLongTile;
  static constexpr int kGroups = kDim <= 64 ? 3 : 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = kGroups == 3 ? 160 : 232, kLoading = kGroups == 3 ? 32 : 40;
  static constexpr int kStages = 4, kAhead = 2;
  static constexpr uint32_t kPanel = kTile * kRowBytes, kStage = kPanels * kPanel;
  static constexpr uint32_t kOwnPanel = kRows * kRowBytes, kOwn = kPanels * kOwnPanel;
  // Places in shared memory, behind the stages.
  static constexpr uint32_t kOwnAt = kStages * kStage, kStagingAt = kOwnAt + kOwn, kOnes = kStagingAt + kOwn;
  static constexpr uint32_t kKeys = kOnes + 256, kBarriers = kKeys + kStages * kTile / 8;
  static constexpr uint32_t kBytes = kBarriers + 16 * kStages;
  static_assert(kDim % 64 == 0 && kDim <= 128 && kBytes <= 232448);
};

template <class S>
struct LongOutput {
  using T = typename S::T;
  static constexpr int kTerms = S::kTile / 16;
  const LongCall& call;
  HeadPlace at;
  int first;               // of the warp group's rows
  float shift[2];          // of the thread's two rows: P = 2^(factor s - shift); minus infinity without a key
  float exact[2];          // their sums, of exact weights
  float sum[4];            // of rounded ones: of the two rows, two equal numbers each
  float acc[S::kDim / 2];  // (64, kDim) per warp group
  uint32_t p[kTerms][4];   // (16, kTile) per warp: weights, rounded

  CRATE_DEVICE int row(int half) const { return first + 16 * at.warp + (at.lane() >> 2) + 8 * half; }

  CRATE_DEVICE void find_shifts(int index, const Head& head) {
    const int tiles = (call.seqlen + S::kTile - 1) / S::kTile;
    const int before = S::kCausal ? first / S::kTile : (head.length + S::kTile - 1) / S::kTile;
    float maximum = -INFINITY;
    for (int n = at.lane(); n < before; n += kWarp) {
      maximum = fmaxf(maximum, call.tile_stats[static_cast<int64_t>(index) * tiles + n]);
    }
    maximum = warp_max(maximum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 own = call.numbers[head.row + min(row(half), head.length - 1)];
      shift[half] = own.x + (S::kCausal ? fmaxf(maximum, own.y) : maximum) - ForwardRange<T>::kTop;
    }
  }

  CRATE_DEVICE void start_scores(float (&s)[S::kTile / 2], int tile) const {
    const uint32_t right = at.base + tile % S::kStages * S::kStage;
    wgmma_fence();
    add_scores<T, S::kTile, S::kDim>(s, at.base + S::kOwnAt + 64 * at.group * kRowBytes, right, S::kOwnPanel, S::kPanel,
                                     false);
    wgmma_commit();
  }
  // Begins the products of the weights with a tile's tokens, and with ones.
  CRATE_DEVICE void start_sums(int tile) {
    wgmma_fence();
    add_tokens<T, S::kDim, kTerms>(acc, p, at.base + tile % S::kStages * S::kStage, S::kPanel, true);
#pragma unroll
    for (int kk = 0; kk < kTerms; ++kk) {
      Wgmma<T, 8>::template rs<false>(sum, p[kk], matrix_descriptor<Swizzle::kNone>(at.base + S::kOnes, 128, 128),
                                      true);
    }
    wgmma_commit();
  }
  CRATE_DEVICE void wait_for_sums() {
    wgmma_wait<0>();
    pin(acc), pin(sum);
#pragma unroll
    for (int kk = 0; kk < kTerms; ++kk) pin(p[kk]);
  }

  // s becomes weights.
  CRATE_DEVICE void weigh(float (&s)[S::kTile / 2], int tile, int length) {
#pragma unroll
    for (int i = 0; i < S::kTile / 2; ++i) s[i] = s[i] * call.factor - shift[i % 4 / 2];
    const int column = tile * S::kTile, end = column + S::kTile;
    if (call.key_padding_mask != nullptr || end > length || (S::kCausal && end > first + 1)) {
      const uint4 bits = load_shared_4(at.base + S::kKeys + tile % S::kStages * (S::kTile / 8));
      const uint32_t keys[4] = {bits.x, bits.y, bits.z, bits.w};
      const int lane = at.lane();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const uint32_t seen = S::kCausal ? bits_up_to(row(half) - column - 32 * word) : ~0u;
          const uint32_t mine = (keys[word] & seen) >> (lane & 3) * 2;
#pragma unroll
          for (int i = 16 * word; i < 16 * word + 16; ++i) {
            if (i % 4 / 2 == half) s[i] = mine >> (i % 16 / 4 * 8 + i % 2) & 1 ? s[i] : -INFINITY;
          }
        }
      }
    }
    float more[2] = {0.0f, 0.0f};  // of the thread's two rows
#pragma unroll
    for (int i = 0; i < S::kTile / 2; ++i) {
      s[i] = exp2_fast(s[i]);
      more[i % 4 / 2] += s[i];
    }
    exact[0] += more[0], exact[1] += more[1];
    settle(exact[0] + exact[1]);
  }

  // Adds the tiles up to `tiles` to the warp group's rows. It waits for its turn to multiply, and then
  // passes the turn to the next warp group.
  CRATE_DEVICE void attend(const Stages<S>& stages, int tiles, int length) {
    constexpr int kTurn = 1 + S::kGroups, kPair = 256;
    float s[S::kTile / 2];  // (64, kTile) per warp group
    stages.wait_full(0);
    start_scores(s, 0);
    wgmma_wait<0>();
    pin(s);
    weigh(s, 0, length);
    pack_sums<T, S::kTile>(p, s);
    if (at.group == 0 && tiles > 1) barrier_arrive(kTurn, kPair);
#pragma unroll 1
    for (int n = 1; n < tiles; ++n) {
      stages.wait_full(n);
      barrier_sync(kTurn + at.group, kPair);
      start_scores(s, n);
      start_sums(n - 1);
      const bool last = n + 1 == tiles && at.group + 1 == S::kGroups;  // nobody waits for the turn behind it
      if (!last) barrier_arrive(kTurn + (at.group + 1) % S::kGroups, kPair);
      wgmma_wait<1>();
      pin(s);
      weigh(s, n, length);
      wait_for_sums();
      stages.release(n - 1);
      pack_sums<T, S::kTile>(p, s);
    }
    start_sums(tiles - 1);
    wait_for_sums();
  }

  // out of the rows, and their lse.
  CRATE_DEVICE void finish(int index, const Head& head) {
    const int lane = at.lane();
    float inverse[2];  // of the thread's two rows
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = exact[half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const float rounded = sum[2 * half];
      const bool any = shift[half] != -INFINITY;
      const int i = row(half);
      inverse[half] = any ? inverse_fast(rounded) : 0.0f;
      if ((lane & 3) == 0 && i < head.length) {
        const float lse = any ? (log2_fast(total) + shift[half]) * (1.0f / kLog2E) : -INFINITY;
        call.lse[head.row + i] = lse;
        const int keys = S::kCausal ? i + 1 : head.length;
        if (any && !in_range(rounded, lse, keys))
          atomicMax(call.left + index, S::kCausal ? head.length - i : head.length);
      }
    }
    const uint32_t staging = at.base + S::kStagingAt + (4 * at.group + at.warp) * S::kPanels * 16 * kRowBytes;
    stage_rows<T, S::kDim>(staging, acc, inverse[0], inverse[1], lane);
    __syncwarp();
    store_rows<S>(call, head.first<T>(call, call.out), call.out.row, head.length, staging, first + 16 * at.warp, lane);
  }
  // The more keys, the more errors of fp16's smallest weights.
  static CRATE_DEVICE bool in_range(float total, float lse, int keys) {
    using R = ForwardRange<T>;
    const float minimum = R::kHalf ? R::kMinSum / 256 * max(keys, 256) : R::kMinSum;
    return R::holds(total, lse, minimum);
  }
};

template <class T, int DIM, bool CAUSAL>
__global__ void __launch_bounds__(LongForwardShape<T, DIM, CAUSAL>::kThreads, 1)
    long_forward_kernel(const __grid_constant__ LongCall call) {
  using S = LongForwardShape<T, DIM, CAUSAL>;
  using Tile = Copied<S, S::kTile, S::kPanel>;
  using Own = Copied<S, 64, S::kOwnPanel>;
  const int index = blockIdx.x / call.blocks, place = blockIdx.x % call.blocks;
  // Causal, the last rows have the most keys: their block starts first.
  const int rows = (CAUSAL ? call.blocks - 1 - place : place) * S::kRows;
  const Head head(call, index);
  if (rows >= head.length) return;
  const int end = CAUSAL ? min(head.length, rows + S::kRows) : head.length, tiles = (end + S::kTile - 1) / S::kTile;
  const HeadPlace at = {shared_address(aligned_shared_memory()), warp_group(),
                        __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5 & 3), 0)};
  const Stages<S> stages = {at.base + S::kBarriers};
  if (threadIdx.x == 0) stages.init();
  if (threadIdx.x < 64) store_shared(at.base + S::kOnes + 4 * threadIdx.x, __uint_as_float(pack_pair<T>(1.0f, 1.0f)));
  fence_async_shared();
  __syncthreads();
  if (at.group == S::kGroups) {
    fewer_registers<S::kLoading>();
    const uint8_t* const key_mask = head.key_mask(call);
    stages.feed(tiles, [&](int tile, int stage) {
      const int first = tile * S::kTile, id = fresh(threadIdx.x) & 127, token = first + id;
      load_tokens<Tile>(call, head, call.w, at.base + stage * S::kStage, key_mask, first, id);
      const uint32_t keys = __ballot_sync(kAllLanes, token < head.length && (key_mask == nullptr || key_mask[token]));
      if (id % kWarp == 0) store_shared(at.base + S::kKeys + stage * (S::kTile / 8) + id / 8, __uint_as_float(keys));
    });
  } else {
    more_registers<S::kRegisters>();
    LongOutput<S> output = {call, at, rows + 64 * at.group, {}, {}, {}, {}, {}};
    load_tokens<Own>(call, head, call.w, at.base + S::kOwnAt + 64 * at.group * kRowBytes, nullptr, output.first,
                     fresh(threadIdx.x) & 127);
    copy_async_commit();
    output.find_shifts(index, head);
    copy_async_wait<0>();
    fence_async_shared();
    barrier_sync(1 + at.group, 128);
    output.attend(stages, tiles, head.length);
    output.finish(index, head);
  }
}

}  // namespace crate_kernels::mssa
