// The gradients of a warp group's rows, tile by tile, for both backwards of long rows: long_backward.cuh has the
// equations, long_pairs.cuh the sums of the tiles' own rows.
#pragma once

#include "long_delta.cuh"

namespace crate_kernels::mssa {

// Begins the copies of a tile from token `first` on, by the loading warp group.
template <class S>
CRATE_DEVICE void load_tile(const LongCall& call, const Head& head, uint32_t base, int first, int stage) {
  using Tile = Copied<S, S::kTile, S::kPanel>;
  const int id = fresh(threadIdx.x) & 127, token = first + id;
  const uint32_t to = base + stage * S::kStage;
  load_tokens<Tile>(call, head, call.w, to, nullptr, first, id);
  load_tokens<Tile>(call, head, call.scaled, to + S::kTokens, nullptr, first, id);
  if (id >= S::kTile) return;
  const float2 numbers = token < head.length ? call.numbers[head.row + token] : make_float2(0.0f, 0.0f);
  const uint32_t number = base + S::kNumbers + (stage * S::kTile + id) * 8;
  store_shared(number, numbers.x), store_shared(number + 4, numbers.y);
}

// What a row's tokens are to it.
enum class Walk { kBoth, kKeys, kQueries };

template <class S>
struct LongGradient {
  using T = typename S::T;
  static constexpr int kTerms = S::kTile / 16, kSums = S::kTile / 2;
  const LongCall& call;
  HeadPlace at;
  int count;                            // tiles of the head
  int own;                              // causal, the tile of the warp group's own rows; else -1
  float c;                              // E = 2^(factor s - c)
  float delta[2], is_key[2];            // of the thread's two rows
  float acc[S::kDim / 2];               // (64, kDim) per warp group
  uint32_t e[kTerms][4], a[kTerms][4];  // (16, kTile) per warp: E and scale A, rounded

  // The rows from `first` on: begins their copies, and takes their numbers.
  CRATE_DEVICE void take(const Head& head, int first) {
    using Own = Copied<S, 64, S::kOwnPanel>;
    const int id = fresh(threadIdx.x) & 127;
    load_tokens<Own>(call, head, call.w, own_rows(), nullptr, first, id);
    load_tokens<Own>(call, head, call.scaled, own_rows() + S::kOwn, nullptr, first, id);
    copy_async_commit();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * at.warp + (at.lane() >> 2) + 8 * half;
      if (row < head.length) {
        const float2 numbers = call.numbers[head.row + row];
        delta[half] = numbers.x, is_key[half] = numbers.y;
      }
    }
  }
  CRATE_DEVICE uint32_t own_rows() const { return at.base + S::kOwnAt + 64 * at.group * kRowBytes; }
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
    start_scores(s, n);
    start_products<WALK>(t, n);
  }
  CRATE_DEVICE void start_scores(float (&s)[kSums], int n) const {
    wgmma_fence();
    add_scores<T, S::kTile, S::kDim>(s, own_rows(), stage(n), S::kOwnPanel, S::kPanel, false);
    wgmma_commit();
  }
  template <Walk WALK>
  CRATE_DEVICE void start_products(float (&t)[kSums], int n) const {
    const uint32_t left = own_rows(), w = stage(n);
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
  // At most so many groups of products behind them are unfinished.
  template <int BEHIND = 0>
  CRATE_DEVICE void wait_for_sums() {
    wgmma_wait<BEHIND>();
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
    const bool masked = call.key_padding_mask != nullptr;
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
          s[4 * eight + i] *= WALK == Walk::kKeys ? (i % 2 == 0 ? of.y : of.w) : is_key[i / 2];
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
    float s[kSums], t[kSums];  // (64, kTile) per warp group
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

}  // namespace crate_kernels::mssa
