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

#include "long_delta.cuh"

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

// What a row's tokens are to it.
enum class Walk { kBoth, kKeys, kQueries };

template <class S>
struct LongGradient {
  using T = typename S::T;
  static constexpr int kTerms = S::kTile / 16, kSums = S::kTile / 2;
  const LongCall& call;
  HeadPlace at;
  int count;                // tiles of the head
  int own;                  // causal, the tile of the warp group's own rows; else -1
  float c;                  // E = 2^(factor s - c)
  float delta[2], keep[2];  // of the thread's two rows
  float acc[S::kDim / 2];
  uint32_t e[kTerms][4], a[kTerms][4];

  CRATE_DEVICE uint32_t stage(int n) const { return at.base + n % S::kStages * S::kStage; }
  // d^ of two columns of eight, and beside each whether it is a key.
  CRATE_DEVICE float4 numbers_of(int n, int eight) const {
    const uint4 bits =
        load_shared_4(at.base + S::kNumbers + n % S::kStages * (S::kTile * 8) + 64 * eight + (at.lane() & 3) * 16);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
  }

  // Begins the products of a tile: s, then t, in two groups.
  template <Walk WALK>
  CRATE_DEVICE void start(float (&s)[kSums], float (&t)[kSums], int n) const {
    const uint32_t left = at.base + S::kOwnAt + 64 * at.group * kRowBytes, w = stage(n);
    wgmma_fence();
    add_scores<T, S::kTile, S::kDim>(s, left, w, S::kOwnPanel, S::kPanel, false);
    wgmma_commit();
    if constexpr (WALK != Walk::kKeys) {
#pragma unroll
      for (int eight = 0; eight < S::kTile / 8; ++eight) {
        const float4 of = numbers_of(n, eight);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          t[4 * eight + i] = -(WALK == Walk::kBoth ? delta[i / 2] : 0.0f) - (i % 2 == 0 ? of.x : of.z);
        }
      }
    }
    wgmma_fence();
    if constexpr (WALK != Walk::kQueries) {
      add_scores<T, S::kTile, S::kDim>(t, left + S::kOwn, w, S::kOwnPanel, S::kPanel, WALK == Walk::kBoth);
    }
    if constexpr (WALK != Walk::kKeys) {
      add_scores<T, S::kTile, S::kDim>(t, left, w + S::kTokens, S::kOwnPanel, S::kPanel, true);
    }
    wgmma_commit();
  }
  // Begins the sums of a tile.
  template <Walk WALK>
  CRATE_DEVICE void start_sums(int n) {
    wgmma_fence();
    add_tokens<T, S::kDim, kTerms>(acc, a, stage(n), S::kPanel, true);
    if constexpr (WALK != Walk::kKeys) add_tokens<T, S::kDim, kTerms>(acc, e, stage(n) + S::kTokens, S::kPanel, true);
    wgmma_commit();
  }
  CRATE_DEVICE void wait_for_sums() {
    wgmma_wait<0>();
    pin(acc);
#pragma unroll
    for (int kk = 0; kk < kTerms; ++kk) pin(a[kk]), pin(e[kk]);
  }

  // s becomes E; 0 where a pair has not this direction.
  template <Walk WALK>
  CRATE_DEVICE void weigh(float (&s)[kSums], int n) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) s[i] = s[i] * call.factor - c;
    // Never so if keys and queries have one walk; but without a branch the assembler moves the powers behind the waits
    // for the products that they run beside.
    const bool masked = call.keep != nullptr;
    if (masked) {  // no lse bounds the score of two tokens of which none is a key of the other
#pragma unroll
      for (int i = 0; i < kSums; ++i) s[i] = fminf(s[i], BackwardRange<T>::kTop);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) s[i] = exp2_fast(s[i]);
    if (masked) {
#pragma unroll
      for (int eight = 0; eight < S::kTile / 8; ++eight) {
        const float4 of = numbers_of(n, eight);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[4 * eight + i] *= WALK == Walk::kKeys ? (i % 2 == 0 ? of.y : of.w) : keep[i / 2];
        }
      }
    }
    if (S::kApart && n == own) {
      const int lane = at.lane(), behind = 16 * at.warp + (lane >> 2) - (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int by = behind + i % 4 / 2 * 8 - (i / 4 * 8 + i % 2);  // how far the row is behind the column
        s[i] = (WALK == Walk::kKeys ? by < 0 : by > 0) ? 0.0f : s[i];
      }
    }
  }
  // t becomes scale A.
  template <Walk WALK>
  CRATE_DEVICE void multiply(const float (&s)[kSums], float (&t)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      // Sums that began as so few different numbers would be serialised.
      if constexpr (WALK == Walk::kKeys) t[i] -= delta[i % 4 / 2];
      t[i] *= s[i] * call.scale;
    }
  }
  template <Walk WALK>
  CRATE_DEVICE void pack(const float (&s)[kSums], const float (&t)[kSums]) {
    pack_sums<T, S::kTile>(a, t);
    if constexpr (WALK != Walk::kKeys) pack_sums<T, S::kTile>(e, s);
  }

  // Adds the tiles from `from` to `to`, of which the last is used again if `again`.
  template <Walk WALK>
  CRATE_DEVICE void walk(const Stages<S>& stages, int from, int to, bool again) {
    if (from >= to) return;
    float s[kSums], t[kSums];
    stages.wait_full(from);
    start<WALK>(s, t, from);
    wgmma_wait<1>();
    pin(s);
    weigh<WALK>(s, from);
    wgmma_wait<0>();
    pin(t);
    multiply<WALK>(s, t);
    pack<WALK>(s, t);
#pragma unroll 1
    for (int n = from + 1; n < to; ++n) {
      stages.wait_full(n);
      start<WALK>(s, t, n);
      start_sums<WALK>(n - 1);
      wgmma_wait<2>();
      pin(s);
      weigh<WALK>(s, n);
      wgmma_wait<1>();
      pin(t);
      multiply<WALK>(s, t);
      wait_for_sums();
      stages.release(n - 1);
      pack<WALK>(s, t);
    }
    start_sums<WALK>(to - 1);
    wait_for_sums();
    if (!again) stages.release(to - 1);
  }
};

template <class T, int DIM, bool APART>
__global__ void __launch_bounds__(LongBackwardShape<T, DIM, APART>::kThreads, 1)
    long_backward_kernel(const __grid_constant__ LongCall call, int causal) {
  using S = LongBackwardShape<T, DIM, APART>;
  using Tile = Copied<S, S::kTile, S::kPanel>;
  using Own = Copied<S, 64, S::kOwnPanel>;
  const int index = blockIdx.x / call.blocks, rows = blockIdx.x % call.blocks * S::kRows;
  const HeadTokensOf head(call, index);
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
      const int first = (n < count ? n : n - count) * S::kTile, id = fresh(threadIdx.x) & 127, token = first + id;
      const uint32_t to = at.base + stage * S::kStage;
      load_tokens<Tile>(call, head, call.w, to, nullptr, first, id);
      load_tokens<Tile>(call, head, call.scaled, to + S::kTokens, nullptr, first, id);
      if (id >= S::kTile) return;
      const float2 numbers = token < head.length ? call.numbers[head.numbers + token] : make_float2(0.0f, 0.0f);
      const uint32_t number = at.base + S::kNumbers + (stage * S::kTile + id) * 8;
      store_shared(number, numbers.x), store_shared(number + 4, numbers.y);
    });
  } else {
    more_registers<S::kRegisters>();
    const int first = rows + 64 * at.group, id = fresh(threadIdx.x) & 127;
    const uint32_t own = at.base + S::kOwnAt + 64 * at.group * kRowBytes;
    load_tokens<Own>(call, head, call.w, own, nullptr, first, id);
    load_tokens<Own>(call, head, call.scaled, own + S::kOwn, nullptr, first, id);
    copy_async_commit();
    const int place = causal ? first / S::kTile : -1;
    LongGradient<S> gradient = {call, at, count, place, call.of_head[index].x, {}, {}, {}, {}, {}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * at.warp + (at.lane() >> 2) + 8 * half;
      if (row < head.length) {
        const float2 numbers = call.numbers[head.numbers + row];
        gradient.delta[half] = numbers.x, gradient.keep[half] = numbers.y;
      }
    }
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
    store_rows<S>(call, head.of<T>(call, call.dw), call.dw.row, head.length, staging, first + 16 * at.warp, at.lane());
  }
}

}  // namespace crate_kernels::mssa
