// The gradients of a warp group's rows, for the backward of whole heads on sm_90a (head_backward.cuh).
//
// With c of the head, r_i = exp(lse_i - c), g^_i = g_i / r_i rounded once, and d^_i = g^_i . out_i - dlse_i / r_i from
// the rounded g^,
//
//     E_ij = exp(s_ij - c)        A_ij = E_ij (g^_i . w_j + w_i . g^_j - d^_i - d^_j)
//     dw_i = sum_j scale A_ij w_j + E_ij g^_j
//
// E and A are symmetric (docs/mssa.md, the symmetric backward). A warp group has 64 rows, and walks over the columns by
// tiles: two products for E and A, two sums from registers. Up to three warp groups; the rows beyond theirs, the tail,
// are columns of everyone: E and A of those go through shared memory, and one warp group multiplies them, transposed.
//
// Of a masked key only the direction in which it is the query is left. So the products for A take w^, whose masked rows
// are 0, for w; the rows of E as weights of g^ are 0 for masked rows.
//
// If the rounding of out would show in dw, d^_i = sum_j E_ij g^_i . w_j / sum_j E_ij - dlse_i / r_i, two products more.
// A head is refused if lse spreads too far for E and g^: it is noted, and left to other kernels.
#pragma once

#include "head_tokens.cuh"

namespace crate_kernels::mssa {

// ROWS: the longest sequence, rounded up to a multiple of 16, at least 64.
template <class T_, int DIM_, int ROWS_, bool MASKED_>
struct HeadShape {
  using T = T_;
  static constexpr int kDim = DIM_, kRows = ROWS_;
  static constexpr bool kMasked = MASKED_;
  static constexpr int kBlocks = kRows / 64 < 3 ? kRows / 64 : 3, kTail = kRows - 64 * kBlocks;
  static constexpr int kThreads = 128 * kBlocks, kTile = kDim <= 64 ? 64 : 32, kMost = kTile / 16;
  static constexpr int kPanels = (kDim + 63) / 64;
  static constexpr uint32_t kPanel = kRows * kRowBytes, kTokens = kPanels * kPanel;
  static constexpr uint32_t kStage = (kMasked ? 3 : 2) * kTokens;  // w, g, w^
  static constexpr uint32_t kStaging = kBlocks * kPanels * 64 * kRowBytes;
  static constexpr uint32_t kColumns = kTail == 0 ? 0 : (kRows * Columns<kTail>::kPitch + 1023) / 1024 * 1024;
  static constexpr uint32_t kRest = kStaging + 2 * kColumns + 2048 + 256;  // d^, keep, numbers of the warps
  static constexpr uint32_t kMostBytes = 232448;
  static constexpr int kStages = 2 * kStage + kRest <= kMostBytes ? 2 : 1;
  static constexpr uint32_t kBytes = kStages * kStage + kRest;
  // Places in shared memory, behind the stages.
  static constexpr uint32_t kStagingAt = kStages * kStage, kEColumns = kStagingAt + kStaging;
  static constexpr uint32_t kAColumns = kEColumns + kColumns, kDeltas = kAColumns + kColumns;
  static constexpr uint32_t kKeeps = kDeltas + 1024, kNumbers = kKeeps + 1024;
  static_assert(kDim % 16 == 0 && kDim <= 128 && kRows % 16 == 0 && kRows >= 64 && kRows <= 256);
  static_assert(kBytes <= kMostBytes, "more than a block can have");
  // The range of E and of g^: E is at most 2^kTop, and lse spreads by at most kSpread bits.
  static constexpr bool kHalf = sizeof(T) == 2 && !std::is_same_v<T, bf16>;
  static constexpr float kTop = kHalf ? 10.0f : 60.0f, kSpread = kHalf ? 20.0f : 150.0f;
  static constexpr float kLargest = 16.0f;  // |g| in fp16, by a power of two for each head
};

template <class S>
struct HeadGradient {
  using T = typename S::T;
  HeadPlace at;
  uint32_t w;               // this head's tokens; g and w^ are behind them
  uint32_t left;            // the warp group's rows of w
  float factor, c, scale;   // E = 2^(factor s - c)
  float delta[2], keep[2];  // of the thread's two rows
  float acc[S::kDim / 2];
  uint32_t e[S::kMost][4], a[S::kMost][4];

  // Begins the products of the warp group's rows with COLUMNS columns from `column` on: s, then t, in two groups.
  template <int COLUMNS>
  CRATE_DEVICE void start(float (&s)[COLUMNS / 2], float (&t)[COLUMNS / 2], int column) const {
    const uint32_t right = column * kRowBytes;
    wgmma_fence();
    add_scores<T, COLUMNS, S::kDim>(s, left, w + right, S::kPanel, false);
    wgmma_commit();
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const uint32_t place = 4 * column + n * 32 + (at.lane() & 3) * 8;
      const float2 d = load_shared_2(at.base + S::kDeltas + place);
      if constexpr (S::kMasked) {
        const float2 k = load_shared_2(at.base + S::kKeeps + place);
        t[4 * n] = -delta[0] * k.x - d.x * keep[0], t[4 * n + 1] = -delta[0] * k.y - d.y * keep[0];
        t[4 * n + 2] = -delta[1] * k.x - d.x * keep[1], t[4 * n + 3] = -delta[1] * k.y - d.y * keep[1];
      } else {
        t[4 * n] = -delta[0] - d.x, t[4 * n + 1] = -delta[0] - d.y;
        t[4 * n + 2] = -delta[1] - d.x, t[4 * n + 3] = -delta[1] - d.y;
      }
    }
    wgmma_fence();
    constexpr uint32_t kKept = S::kMasked ? 2 * S::kTokens : 0;
    add_scores<T, COLUMNS, S::kDim>(t, left + S::kTokens, w + kKept + right, S::kPanel, true);
    add_scores<T, COLUMNS, S::kDim>(t, left + kKept, w + S::kTokens + right, S::kPanel, true);
    wgmma_commit();
  }

  // s becomes E, and t scale A, once its products are done.
  template <int COUNT>
  CRATE_DEVICE void weigh(float (&s)[COUNT], float (&t)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float x = s[i] * factor - c;
      s[i] = exp2_fast(S::kMasked ? fminf(x, S::kTop) : x);  // two masked tokens: no lse bounds their score
    }
    wgmma_wait<0>();
    pin(t);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) t[i] *= s[i] * scale;
  }

  // E as weights of g^: not of a row that is no key.
  template <int COUNT>
  CRATE_DEVICE void keep_rows(float (&s)[COUNT]) const {
    if constexpr (S::kMasked) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] *= keep[i % 4 / 2];
    }
  }

  template <int COLUMN>
  static constexpr int width() {
    constexpr int kEnd = COLUMN < 64 * S::kBlocks ? 64 * S::kBlocks : S::kRows;
    return kEnd - COLUMN < S::kTile ? kEnd - COLUMN : S::kTile;
  }

  // Adds all columns from COLUMN on, whose products have begun.
  template <int COLUMN>
  CRATE_DEVICE void walk(float (&s)[width<COLUMN>() / 2], float (&t)[width<COLUMN>() / 2]) {
    constexpr int kWidth = width<COLUMN>(), kNext = COLUMN + kWidth, kTerms = kWidth / 16;
    wgmma_wait<1>();
    pin(s);
    if constexpr (COLUMN > 0) {
      pin(acc);
#pragma unroll
      for (int kk = 0; kk < S::kMost; ++kk) pin(e[kk]), pin(a[kk]);
    }
    weigh(s, t);
    pack_sums<T, kWidth>(a, t);
    if constexpr (COLUMN >= 64 * S::kBlocks) {
      float columns[kWidth / 2];
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) columns[i] = s[i];
      weigh_columns<COLUMN, kWidth>(columns);
      pack_sums<T, kWidth>(e, columns);
      put_columns<kWidth>(64 * at.group + 16 * at.warp, COLUMN - 64 * S::kBlocks);
    }
    keep_rows(s);
    pack_sums<T, kWidth>(e, s);
    wgmma_fence();
    add_tokens<T, S::kDim, kTerms>(acc, a, w + COLUMN * kRowBytes, S::kPanel, COLUMN > 0);
    add_tokens<T, S::kDim, kTerms>(acc, e, w + S::kTokens + COLUMN * kRowBytes, S::kPanel, true);
    wgmma_commit();
    if constexpr (kNext < S::kRows) {
      float next_s[width<kNext>() / 2], next_t[width<kNext>() / 2];
      start<width<kNext>()>(next_s, next_t, kNext);
      walk<kNext>(next_s, next_t);
    } else {
      wgmma_wait<0>();
      pin(acc);
#pragma unroll
      for (int kk = 0; kk < S::kMost; ++kk) pin(e[kk]), pin(a[kk]);
    }
  }

  // d^ of the 64 rows from `first` on as a sum over their weights; of those in the tail, if `tail`, else of the others.
  CRATE_DEVICE void sum_deltas(const HeadCall& call, int index, int first, bool tail, float unit) {
    const HeadTokensOf head(call, index);
    left = w + first * kRowBytes;
    float total[2] = {0.0f, 0.0f}, products[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int column = 0; column < head.length; column += 16) {
      float s[8], t[8];
      const uint32_t right = w + column * kRowBytes;
      wgmma_fence();
      add_scores<T, 16, S::kDim>(s, left, right, S::kPanel, false);
      add_scores<T, 16, S::kDim>(t, left + S::kTokens, right, S::kPanel, false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(s), pin(t);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key = column + i / 4 * 8 + (at.lane() & 3) * 2 + i % 2;
        const float x = s[i] * factor - c;
        bool is_key = key < head.length;
        if constexpr (S::kMasked) is_key = is_key && load_shared(at.base + S::kKeeps + 4 * key) != 0.0f;
        const float weight = is_key ? exp2_fast(x) : 0.0f;
        total[i % 4 / 2] += weight;
        products[i % 4 / 2] += weight * t[i];
      }
    }
    const int row = first + 16 * at.warp + (at.lane() >> 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        total[half] += __shfl_xor_sync(kAllLanes, total[half], step);
        products[half] += __shfl_xor_sync(kAllLanes, products[half], step);
      }
      const int i = row + 8 * half;
      if ((at.lane() & 3) != 0 || (i >= 64 * S::kBlocks) != tail || i >= head.length) continue;
      float d = total[half] == 0.0f ? 0.0f : products[half] / total[half];
      if (call.dlse != nullptr && total[half] != 0.0f) {
        d -= call.dlse[head.numbers + i] * exp2_fast(c - call.lse[head.numbers + i] * kLog2E) * unit;
      }
      store_shared(at.base + S::kDeltas + 4 * i, d);
    }
  }

  // The columns of the tail's own rows. Of the last 64 rows, those of the last warps are the tail's.
  CRATE_DEVICE void put_tail() { put_tail_columns<0>(); }

  template <int FIRST>
  CRATE_DEVICE void put_tail_columns() {
    if constexpr (FIRST < S::kTail) {
      constexpr int kBegin = 64 * S::kBlocks + FIRST, kWidth = width<kBegin>(), kTop = S::kRows - 64;
      float s[kWidth / 2], t[kWidth / 2];
      const int row = kTop + 16 * at.warp + (at.lane() >> 2);
      left = w + kTop * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        delta[half] = load_shared(at.base + S::kDeltas + 4 * (row + 8 * half));
        keep[half] = S::kMasked ? load_shared(at.base + S::kKeeps + 4 * (row + 8 * half)) : 1.0f;
      }
      start<kWidth>(s, t, kBegin);
      wgmma_wait<1>();
      pin(s);
      weigh(s, t);
      pack_sums<T, kWidth>(a, t);
      weigh_columns<kBegin, kWidth>(s);
      pack_sums<T, kWidth>(e, s);
      if (kTop + 16 * at.warp >= 64 * S::kBlocks) put_columns<kWidth>(kTop + 16 * at.warp, FIRST);
      put_tail_columns<FIRST + kWidth>();
    }
  }

  // E as weights of the rows' g^ for keys of the tail: not for one that is no key.
  template <int COLUMN, int WIDTH>
  CRATE_DEVICE void weigh_columns(float (&s)[WIDTH / 2]) const {
    if constexpr (S::kMasked) {
#pragma unroll
      for (int n = 0; n < WIDTH / 8; ++n) {
        const float2 k = load_shared_2(at.base + S::kKeeps + 4 * COLUMN + n * 32 + (at.lane() & 3) * 8);
        s[4 * n] *= k.x, s[4 * n + 1] *= k.y, s[4 * n + 2] *= k.x, s[4 * n + 3] *= k.y;
      }
    }
  }

  // Stores e and a of a warp's 16 rows, WIDTH columns from `first` of the tail on.
  template <int WIDTH>
  CRATE_DEVICE void put_columns(int row, int first) const {
    const int lane = at.lane();
#pragma unroll
    for (int kk = 0; kk < WIDTH / 16; ++kk) {
      Columns<S::kTail>::put(at.base + S::kEColumns, e[kk], row, first + 16 * kk, lane);
      Columns<S::kTail>::put(at.base + S::kAColumns, a[kk], row, first + 16 * kk, lane);
    }
  }
};

}  // namespace crate_kernels::mssa
