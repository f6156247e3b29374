// The gradients of a warp group's rows, for the backward of whole heads on sm_90a (head_backward.cuh).
//
// With c of the head, r_i = exp(lse_i - c), g^_i = g_i / r_i rounded once, and d^_i = g^_i . out_i - dlse_i / r_i from
// the rounded g^,
//
//     E_ij = exp(s_ij - c)        A_ij = E_ij (g^_i . w_j + w_i . g^_j - d^_i - d^_j)
//     dw_i = sum_j scale A_ij w_j + E_ij g^_j
//
// E and A are symmetric (docs/derivations.md, divided gradients). A warp group has 64 rows, and walks over the columns
// by tiles: two products for E and A, two sums from registers. Up to three warp groups; the rows beyond theirs, the
// tail, are columns of everyone: E and A of those go through shared memory, and one warp group multiplies them,
// transposed.
//
// Of a masked key only the direction in which it is the query is left. So the products for A take w^, whose masked rows
// are 0, for w; the rows of E as weights of g^ are 0 for masked rows.
//
// Causal, a pair has one direction, in which the later token is the query, and a token has both with itself:
//
//     A_ij = E_ij (g^_i . w_j - d^_i)  j < i,        E_ij (w_i . g^_j - d^_j)  j > i,        both  j = i
//     dw_i = sum_j scale A_ij w_j + sum_{j >= i} E_ij g^_j
//
// A is symmetric as before. Of three products for E and A a tile off the diagonal has two, and one before it no sum of
// g^. Each warp group has separate code for its walk: on which side of the diagonal a tile is, its code knows.
//
// If the rounding of out would show in dw, d^_i = sum_j E_ij g^_i . w_j / sum_j E_ij - dlse_i / r_i, two products more.
// A head is left to other kernels if lse spreads too far for E and g^, or is too large for its own rounding.
#pragma once

#include "head_tokens.cuh"

namespace crate_kernels::mssa {

// ROWS: the longest sequence, rounded up to a multiple of 16, at least 64.
template <class T_, int DIM_, int ROWS_, bool MASKED_, bool CAUSAL_>
struct HeadBackwardShape {
  using T = T_;
  static constexpr int kDim = DIM_, kRows = ROWS_;
  static constexpr bool kMasked = MASKED_, kCausal = CAUSAL_;
  static constexpr int kBlocks = kRows / 64 < 3 ? kRows / 64 : 3, kTail = kRows - 64 * kBlocks;
  static constexpr int kThreads = 128 * kBlocks, kTile = kDim <= 64 ? 64 : 32, kFragments = kTile / 16;
  static constexpr int kPanels = (kDim + 63) / 64;
  static constexpr uint32_t kPanel = kRows * kRowBytes, kTokens = kPanels * kPanel;
  static constexpr uint32_t kStage = (kMasked ? 3 : 2) * kTokens;  // w, g, w^
  static constexpr uint32_t kStaging = kBlocks * kPanels * 64 * kRowBytes;
  static constexpr uint32_t kColumns = kTail == 0 ? 0 : (kRows * Columns<kTail>::kPitch + 1023) / 1024 * 1024;
  static constexpr uint32_t kRest = kStaging + 2 * kColumns + 2048 + 256;  // d^, is_key, numbers of the warps
  static constexpr uint32_t kMaxBytes = 232448;
  static constexpr int kStages = 2 * kStage + kRest <= kMaxBytes ? 2 : 1;
  static constexpr uint32_t kBytes = kStages * kStage + kRest;
  // Places in shared memory, behind the stages.
  static constexpr uint32_t kStagingAt = kStages * kStage, kEColumns = kStagingAt + kStaging;
  static constexpr uint32_t kAColumns = kEColumns + kColumns, kDeltas = kAColumns + kColumns;
  static constexpr uint32_t kIsKey = kDeltas + 1024, kNumbers = kIsKey + 1024;
  static_assert(kDim % 16 == 0 && kDim <= 128 && kRows % 16 == 0 && kRows >= 64 && kRows <= 256);
  static_assert(kBytes <= kMaxBytes, "more than a block can have");
  static constexpr bool kHalf = BackwardRange<T>::kHalf;
  static constexpr float kTop = BackwardRange<T>::kTop;
};

// Where the columns of a tile are, of 64 rows: anywhere if attention is full; else before, around or behind the
// diagonal, where they are keys, both or queries of the rows.
enum class Side { kFull, kKeys, kBoth, kQueries };

template <class S>
struct HeadGradient {
  using T = typename S::T;
  HeadPlace at;
  uint32_t w;                                         // this head's tokens; g and w^ are behind them
  uint32_t left;                                      // the warp group's rows of w
  float factor, c, scale;                             // E = 2^(factor s - c)
  float delta[2], is_key[2];                          // of the thread's two rows
  float acc[S::kDim / 2];                             // (64, kDim) per warp group
  uint32_t e[S::kFragments][4], a[S::kFragments][4];  // (16, kTile) per warp: E and scale A, rounded

  // The sums of a tile's products: s for E, t for A; on the diagonal t is that of keys alone, and queries are
  // apart.
  template <int COLUMNS, Side SIDE>
  struct Sums {
    static constexpr bool kApart = SIDE == Side::kBoth;
    float s[COLUMNS / 2], t[COLUMNS / 2], more[kApart ? COLUMNS / 2 : 1];  // (64, COLUMNS) per warp group
    CRATE_DEVICE auto& queries() {
      if constexpr (kApart) {
        return more;
      } else {
        return t;
      }
    }
  };

  // Begins the products of the warp group's rows with COLUMNS columns from `column` on: s, then t, in two groups.
  template <int COLUMNS, Side SIDE>
  CRATE_DEVICE void start(Sums<COLUMNS, SIDE>& sums, int column) const {
    // Else the places of these rows, which are the same for every tile and, with one stage, for every head, are kept in
    // registers, and others spill.
    const uint32_t left = fresh(this->left);
    const uint32_t right = column * kRowBytes;
    float (&s)[COLUMNS / 2] = sums.s, (&t)[COLUMNS / 2] = sums.t;
    wgmma_fence();
    add_scores<T, COLUMNS, S::kDim>(s, left, w + right, S::kPanel, false);
    wgmma_commit();
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const uint32_t place = 4 * column + n * 32 + (at.lane() & 3) * 8;
      const float2 d = load_shared_2(at.base + S::kDeltas + place);
      const float2 k = S::kMasked ? load_shared_2(at.base + S::kIsKey + place) : make_float2(1.0f, 1.0f);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of_key = delta[e / 2] * (e % 2 == 0 ? k.x : k.y);
        const float of_query = (e % 2 == 0 ? d.x : d.y) * (S::kMasked ? is_key[e / 2] : 1.0f);
        if constexpr (SIDE == Side::kFull) {
          t[4 * n + e] = -of_key - of_query;
        } else {
          if constexpr (SIDE != Side::kQueries) t[4 * n + e] = -of_key;
          if constexpr (SIDE != Side::kKeys) sums.queries()[4 * n + e] = -of_query;
        }
      }
    }
    wgmma_fence();
    constexpr uint32_t kKept = S::kMasked ? 2 * S::kTokens : 0;
    if constexpr (SIDE != Side::kQueries) {
      add_scores<T, COLUMNS, S::kDim>(t, left + S::kTokens, w + kKept + right, S::kPanel, true);
    }
    if constexpr (SIDE != Side::kKeys) {
      if constexpr (SIDE == Side::kBoth) wgmma_fence();
      add_scores<T, COLUMNS, S::kDim>(sums.queries(), left + kKept, w + S::kTokens + right, S::kPanel, true);
    }
    wgmma_commit();
  }

  // s becomes E, and t scale A, once its products are done; `behind` is how far a thread's first row is behind its
  // first column.
  template <int COLUMNS, Side SIDE>
  CRATE_DEVICE void weigh(Sums<COLUMNS, SIDE>& sums, int behind) const {
    float (&s)[COLUMNS / 2] = sums.s, (&t)[COLUMNS / 2] = sums.t;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      const float x = s[i] * factor - c;
      // Two tokens of which none is a key of the other: no lse bounds their score.
      s[i] = exp2_fast(S::kMasked ? fminf(x, S::kTop) : x);
    }
    // Never so. But without a branch the assembler moves most powers behind the wait for the products that they run
    // beside.
    if (factor < 0.0f) {
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) s[i] *= factor;
    }
    wgmma_wait<0>();
    pin(t);
    if constexpr (SIDE == Side::kBoth) pin(sums.more);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      if constexpr (SIDE == Side::kBoth) {
        const int by = behind + row_of(i) - column_of(i);
        t[i] = by > 0 ? t[i] : by < 0 ? sums.more[i] : t[i] + sums.more[i];
      }
      t[i] *= s[i] * scale;
    }
  }
  // The place of a sum among a thread's rows and columns.
  static constexpr CRATE_DEVICE int row_of(int i) { return i % 4 / 2 * 8; }
  static constexpr CRATE_DEVICE int column_of(int i) { return i / 4 * 8 + i % 2; }

  // E as weights of g^: not of a row that is no key, nor of one behind its column.
  template <int COLUMNS, Side SIDE>
  CRATE_DEVICE void keep_rows(float (&s)[COLUMNS / 2], int behind) const {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
      if constexpr (S::kMasked) s[i] *= is_key[i % 4 / 2];
      if constexpr (SIDE == Side::kBoth) s[i] = behind + row_of(i) > column_of(i) ? 0.0f : s[i];
    }
  }

  // Where a tile is, of the rows of warp group GROUP, and how many columns it has: half as many on the diagonal,
  // and in the tail if tokens may be masked.
  template <int GROUP, int COLUMN>
  static constexpr Side side() {
    if (!S::kCausal) return Side::kFull;
    return COLUMN < 64 * GROUP ? Side::kKeys : COLUMN < 64 * GROUP + 64 ? Side::kBoth : Side::kQueries;
  }
  template <int GROUP, int COLUMN>
  static constexpr int width() {
    constexpr int kEnd = COLUMN < 64 * S::kBlocks ? 64 * S::kBlocks : S::kRows;
    constexpr bool kNarrow = side<GROUP, COLUMN>() == Side::kBoth || (S::kMasked && COLUMN >= 64 * S::kBlocks);
    constexpr int kWidth = kNarrow ? S::kTile / 2 : S::kTile;
    return kEnd - COLUMN < kWidth ? kEnd - COLUMN : kWidth;
  }

  // Adds all columns from COLUMN on, whose products have begun, to the rows of warp group GROUP, or of any if attention
  // is full.
  template <int GROUP, int COLUMN>
  CRATE_DEVICE void walk(Sums<width<GROUP, COLUMN>(), side<GROUP, COLUMN>()>& sums) {
    constexpr int kWidth = width<GROUP, COLUMN>(), kNext = COLUMN + kWidth, kTerms = kWidth / 16;
    constexpr Side kSide = side<GROUP, COLUMN>();
    wgmma_wait<1>();
    pin(sums.s);
    if constexpr (COLUMN > 0) pin_terms<(!S::kCausal || COLUMN > 64 * GROUP)>();
    const int behind = 64 * GROUP - COLUMN + place();
    weigh(sums, behind);
    pack_sums<T, kWidth>(a, sums.t);
    if constexpr (COLUMN >= 64 * S::kBlocks) {
      if constexpr (!S::kCausal) {
        float columns[kWidth / 2];  // (64, kWidth) per warp group
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) columns[i] = sums.s[i];
        weigh_columns<COLUMN, kWidth, kSide>(columns, behind);
        pack_sums<T, kWidth>(e, columns);
      }
      put_columns<kWidth, !S::kCausal>(64 * at.group + 16 * at.warp, COLUMN - 64 * S::kBlocks);
    }
    if constexpr (kSide != Side::kKeys) {
      keep_rows<kWidth, kSide>(sums.s, behind);
      pack_sums<T, kWidth>(e, sums.s);
    }
    wgmma_fence();
    add_tokens<T, S::kDim, kTerms>(acc, a, w + COLUMN * kRowBytes, S::kPanel, COLUMN > 0);
    if constexpr (kSide != Side::kKeys) {
      add_tokens<T, S::kDim, kTerms>(acc, e, w + S::kTokens + COLUMN * kRowBytes, S::kPanel, true);
    }
    wgmma_commit();
    if constexpr (kNext < S::kRows) {
      Sums<width<GROUP, kNext>(), side<GROUP, kNext>()> next;
      start(next, kNext);
      walk<GROUP, kNext>(next);
    } else {
      wgmma_wait<0>();
      pin_terms<true>();
    }
  }
  // How far a thread's first row is behind its first column, in a tile on the diagonal.
  CRATE_DEVICE int place() const {
    const int lane = at.lane();
    return 16 * at.warp + (lane >> 2) - (lane & 3) * 2;
  }
  // The registers of sums that are done: e too, if it has been used.
  template <bool BOTH>
  CRATE_DEVICE void pin_terms() {
    pin(acc);
#pragma unroll
    for (int kk = 0; kk < S::kFragments; ++kk) {
      pin(a[kk]);
      if constexpr (BOTH) pin(e[kk]);
    }
  }
  template <int GROUP>
  CRATE_DEVICE void walk_all() {
    Sums<width<GROUP, 0>(), side<GROUP, 0>()> sums;
    start(sums, 0);
    walk<GROUP, 0>(sums);
  }

  // d^ of the 64 rows from `first` on as a sum over their weights; of those in the tail, if `tail`, else of the others.
  CRATE_DEVICE void sum_deltas(const HeadCall& call, int index, int first, bool tail, float unit) {
    const Head head(call, index);
    left = w + first * kRowBytes;
    float total[2] = {0.0f, 0.0f}, products[2] = {0.0f, 0.0f};  // of the thread's two rows
    const int row = first + 16 * at.warp + (at.lane() >> 2);
#pragma unroll 1
    for (int column = 0; column < head.length; column += 16) {
      float s[8], t[8];  // (64, 16) per warp group
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
        if constexpr (S::kMasked) is_key = is_key && load_shared(at.base + S::kIsKey + 4 * key) != 0.0f;
        if constexpr (S::kCausal) is_key = is_key && key <= row + row_of(i);
        const float weight = is_key ? exp2_fast(x) : 0.0f;
        total[i % 4 / 2] += weight;
        products[i % 4 / 2] += weight * t[i];
      }
    }
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
        d -= call.dlse[head.row + i] * exp2_fast(c - call.lse[head.row + i] * kLog2E) * unit;
      }
      store_shared(at.base + S::kDeltas + 4 * i, d);
    }
  }

  // The columns of the tail's own rows. Of the last 64 rows, those of the last warps are the tail's.
  CRATE_DEVICE void put_tail() { put_tail_columns<0>(); }

  template <int FIRST>
  CRATE_DEVICE void put_tail_columns() {
    if constexpr (FIRST < S::kTail) {
      constexpr int kBegin = 64 * S::kBlocks + FIRST, kLastRows = S::kRows - 64;
      constexpr int kWidth = width<S::kBlocks, kBegin>();
      constexpr Side kSide = side<S::kBlocks, kBegin>();
      Sums<kWidth, kSide> sums;
      const int row = kLastRows + 16 * at.warp + (at.lane() >> 2);
      left = w + kLastRows * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        delta[half] = load_shared(at.base + S::kDeltas + 4 * (row + 8 * half));
        is_key[half] = S::kMasked ? load_shared(at.base + S::kIsKey + 4 * (row + 8 * half)) : 1.0f;
      }
      start(sums, kBegin);
      wgmma_wait<1>();
      pin(sums.s);
      const int behind = kLastRows - kBegin + place();
      weigh(sums, behind);
      pack_sums<T, kWidth>(a, sums.t);
      weigh_columns<kBegin, kWidth, kSide>(sums.s, behind);
      pack_sums<T, kWidth>(e, sums.s);
      if (kLastRows + 16 * at.warp >= 64 * S::kBlocks) put_columns<kWidth, true>(kLastRows + 16 * at.warp, FIRST);
      put_tail_columns<FIRST + kWidth>();
    }
  }

  // E as weights of the rows' g^ for keys of the tail: not for one that is no key, nor for one behind its row.
  template <int COLUMN, int WIDTH, Side SIDE>
  CRATE_DEVICE void weigh_columns(float (&s)[WIDTH / 2], int behind) const {
    if constexpr (S::kMasked) {
#pragma unroll
      for (int n = 0; n < WIDTH / 8; ++n) {
        const float2 k = load_shared_2(at.base + S::kIsKey + 4 * COLUMN + n * 32 + (at.lane() & 3) * 8);
        s[4 * n] *= k.x, s[4 * n + 1] *= k.y, s[4 * n + 2] *= k.x, s[4 * n + 3] *= k.y;
      }
    }
    if constexpr (SIDE == Side::kBoth) {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) s[i] = behind + row_of(i) < column_of(i) ? 0.0f : s[i];
    }
  }

  // Stores a of a warp's 16 rows, WIDTH columns from `first` of the tail on, and e if BOTH.
  template <int WIDTH, bool BOTH>
  CRATE_DEVICE void put_columns(int row, int first) const {
    const int lane = at.lane();
#pragma unroll
    for (int kk = 0; kk < WIDTH / 16; ++kk) {
      Columns<S::kTail>::put(at.base + S::kAColumns, a[kk], row, first + 16 * kk, lane);
      if constexpr (BOTH) Columns<S::kTail>::put(at.base + S::kEColumns, e[kk], row, first + 16 * kk, lane);
    }
  }
};

}  // namespace crate_kernels::mssa
