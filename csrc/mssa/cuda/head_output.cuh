// out of 64 rows and of the tail, for the forward of whole heads on sm_90a (head_forward.cuh).
//
// With n_k = scale |w_k|^2 / 2, no score s_ij is above n_i + n_j (docs/derivations.md), so that one shift a row,
//
//     P_ij = exp(s_ij - n_i - max n + top)        out_i = sum_j P_ij w_j / sum_j P_ij
//
// needs no running maximum, and the largest weight is at most e^top. A block is one warp group and takes one head after
// another; several of them share a multiprocessor, and what one waits for the others hide. It takes 64 rows at a time,
// and walks over the columns by tiles: a product for scores, a product for out, from registers. The rows beyond the
// whole blocks of 64, the tail, are columns of everyone: their weights, by their own shifts, are made of the same
// scores and go through shared memory; the products for their out are channels times tokens.
//
// Causal, a row has the largest n of the tokens up to it in its shift, so that no bit of a prefix depends on later
// tokens. Each 64 rows have a separate walk, which ends with them; the tail's columns meet them as before, as
// queries.
//
// out is divided by the sum of the rounded weights, a product with ones; lse has that of the exact ones. A head of
// which a row's sum is out of range is noted, and left to other kernels.
#pragma once

#include "head_tokens.cuh"

namespace crate_kernels::mssa {

// ROWS: the longest sequence, rounded up to a multiple of 16, at least 64.
template <class T_, int DIM_, int ROWS_, bool CAUSAL_>
struct HeadForwardShape {
  using T = T_;
  static constexpr bool kCausal = CAUSAL_;
  static constexpr int kDim = DIM_, kRows = ROWS_, kThreads = 128;
  static constexpr int kBlocks = kRows / 64, kTail = kRows % 64;
  static constexpr int kTile = 32, kFragments = kTile / 16;
  static constexpr int kPanels = (kDim + 63) / 64;
  static constexpr uint32_t kPanel = kRows * kRowBytes, kStage = kPanels * kPanel;
  static constexpr uint32_t kStaging = kPanels * 64 * kRowBytes;
  static constexpr uint32_t kColumns = kTail == 0 ? 0 : (kRows * Columns<kTail>::kPitch + 1023) / 1024 * 1024;
  static constexpr uint32_t kPartial = kThreads * kTail;  // a thread's sums of the tail's columns
  static constexpr uint32_t kRest = kStaging + kColumns + kPartial + 1024 + 1024 + 512;  // norms, sums, ones
  // Registers let so many blocks share a multiprocessor. The next head has a second stage if shared memory allows.
  static constexpr int kMaxBeside = kDim <= 112 ? 3 : 2;
  static constexpr uint32_t kMultiprocessor = 233472, kReserved = 1024;
  static constexpr int kStages = kMaxBeside * (2 * kStage + kRest + kReserved) <= kMultiprocessor ? 2 : 1;
  static constexpr uint32_t kBytes = kStages * kStage + kRest;
  static constexpr int kFitting = kMultiprocessor / (kBytes + kReserved);
  static constexpr int kBeside = kFitting < kMaxBeside ? kFitting : kMaxBeside;
  // Places in shared memory, behind the stages.
  static constexpr uint32_t kStagingAt = kStages * kStage, kColumnsAt = kStagingAt + kStaging;
  static constexpr uint32_t kPartials = kColumnsAt + kColumns, kNorms = kPartials + kPartial, kSums = kNorms + 1024;
  static constexpr uint32_t kOnes = kSums + 1024, kNumbers = kOnes + 256, kPlaces = kNumbers + 32, kKeys = kPlaces + 16;
  static_assert(kDim % 16 == 0 && kDim <= 128 && kRows % 16 == 0 && kRows >= 64 && kRows <= 256);
  static constexpr float kTop = ForwardRange<T>::kTop;
};

template <class S>
struct HeadOutput {
  using T = typename S::T;
  const HeadCall& call;
  HeadPlace at;
  uint32_t w;                      // this head's tokens
  int length;                      // and their number
  float raise;                     // of every shift, beside its row's number in shared memory
  float shift[2];                  // of the thread's two rows: P = 2^(factor s - shift); minus infinity without a key
  float exact[2];                  // their sums, of exact weights
  float sum[4];                    // of rounded ones: of the two rows, two equal numbers each
  float acc[S::kDim / 2];          // (64, kDim) per block
  uint32_t rows[S::kDim / 16][4];  // (16, kDim) per warp: the left operand of the scores
  uint32_t p[S::kFragments][4];    // (16, kTile) per warp: weights, rounded

  // The first column of the tile after COLUMN's, for the rows from FIRST on. Causal, the tail follows the diagonal.
  template <int FIRST, int COLUMN>
  static constexpr int next_column() {
    constexpr int kNext = COLUMN + width<COLUMN>();
    return S::kCausal && kNext == FIRST + 64 ? 64 * S::kBlocks : kNext;
  }
  template <int COLUMN>
  static constexpr int width() {
    constexpr int kEnd = COLUMN < 64 * S::kBlocks ? 64 * S::kBlocks : S::kRows;
    return kEnd - COLUMN < S::kTile ? kEnd - COLUMN : S::kTile;
  }

  // The rows of a warp, from `first` on: their tokens and shifts.
  CRATE_DEVICE void take_rows(int first) {
    const int lane = at.lane(), row = lane & 15, more = lane >> 4;
    const uint32_t own = w + first * kRowBytes;
#pragma unroll
    for (int kk = 0; kk < S::kDim / 16; ++kk) {
      load_matrices(rows[kk], own + kk / 4 * S::kPanel + chunk_at(row, 2 * (kk % 4) + more));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shift[half] = load_shared(at.base + S::kNorms + 4 * (first + (lane >> 2) + 8 * half)) + raise;
    }
  }

  // Which of the 32 tokens around one are keys.
  CRATE_DEVICE uint32_t keys_of(int token) const {
    return __float_as_uint(load_shared(at.base + S::kKeys + token / 32 * 4));
  }

  // Begins the products of the rows with COLUMNS columns from `column` on.
  template <int COLUMNS>
  CRATE_DEVICE void start(float (&s)[COLUMNS / 2], int column) const {
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < S::kDim / 16; ++kk) {
      const uint32_t panel = w + column * kRowBytes + kk / 4 * S::kPanel;
      Wgmma<T, COLUMNS>::template rs<false>(s, rows[kk], advance(matrix_descriptor(panel, 0, 1024), kk % 4 * 32),
                                            kk > 0);
    }
    wgmma_commit();
  }

  // s becomes the weights of the warp's rows from `row` on. DIAGONAL: some of the columns are behind some of the rows.
  template <int COLUMN, int WIDTH, bool DIAGONAL>
  CRATE_DEVICE void weigh(float (&s)[WIDTH / 2], int row) const {
    static_assert(COLUMN % 32 == 0 && WIDTH <= 32);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) s[i] = s[i] * call.factor - shift[i % 4 / 2];
    if (DIAGONAL || call.key_padding_mask != nullptr || COLUMN + WIDTH > length) {
      const int lane = at.lane();
      const uint32_t kept = keys_of(COLUMN);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t seen = DIAGONAL ? bits_up_to(row + (lane >> 2) + 8 * half - COLUMN) : ~0u;
        const uint32_t keys = (kept & seen) >> (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) {
          if (i % 4 / 2 == half) s[i] = keys >> (i / 4 * 8 + i % 2) & 1 ? s[i] : -INFINITY;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) s[i] = exp2_fast(s[i]);
  }

  // Stores the weights of a warp's 16 rows for WIDTH columns of the tail, by the columns' shifts; adds them up. OWN:
  // the rows are the tail's.
  template <int COLUMN, int WIDTH, bool OWN>
  CRATE_DEVICE void put_columns(const float (&s)[WIDTH / 2], int row) {
    constexpr int kFirst = COLUMN - 64 * S::kBlocks;
    const int lane = at.lane();
    const uint32_t keys = keys_of(row) >> (row % 32 + (lane >> 2));
#pragma unroll
    for (int kk = 0; kk < WIDTH / 16; ++kk) {
      const uint32_t partial =
          at.base + S::kPartials + (kFirst / 16 + kk) * (16 * S::kThreads) + fresh(threadIdx.x) * 16;
      uint4 bits = {0, 0, 0, 0};
      if (row >= 64) bits = load_shared_4(partial);
      float sums[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w)};
      uint32_t to[4];  // (16, 16) per warp: weights, rounded
#pragma unroll
      for (int n = 2 * kk; n < 2 * kk + 2; ++n) {
        const float2 norm = load_shared_2(at.base + S::kNorms + 4 * COLUMN + n * 32 + (lane & 3) * 8);
        const float of[2] = {norm.x + raise, norm.y + raise};
        float weights[4];  // (16, 8) per warp
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = COLUMN + 8 * n + (lane & 3) * 2 + e % 2;
          const bool seen = !S::kCausal || !OWN || row + (lane >> 2) + e / 2 * 8 <= column;
          weights[e] = seen && (keys >> e / 2 * 8 & 1) ? exp2_fast(s[4 * n + e] * call.factor - of[e % 2]) : 0.0f;
          sums[n % 2 * 2 + e % 2] += weights[e];
        }
        to[2 * (n % 2)] = pack_pair<T>(weights[0], weights[1]);
        to[2 * (n % 2) + 1] = pack_pair<T>(weights[2], weights[3]);
      }
      store_shared_4(partial, {__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]),
                               __float_as_uint(sums[3])});
      Columns<S::kTail>::put(at.base + S::kColumnsAt, to, row, kFirst + 16 * kk, lane);
    }
  }

  // Adds all columns from COLUMN on, whose scores have begun, to the 16 rows from `row` on; causal, these are of the 64
  // rows from FIRST on.
  template <int FIRST, int COLUMN>
  CRATE_DEVICE void walk(float (&s)[width<COLUMN>() / 2], int row) {
    constexpr int kNext = next_column<FIRST, COLUMN>();
    // Behind these scores are the sums of the tile before, if it has some.
    wgmma_wait<(COLUMN > 0 && !(S::kCausal && COLUMN > 64 * S::kBlocks))>();
    pin(s);
    if constexpr (kNext < S::kRows) {
      float next[width<kNext>() / 2];  // (64, width<kNext>()) per warp group
      start<width<kNext>()>(next, kNext);
      add<FIRST, COLUMN>(s, row);
      walk<FIRST, kNext>(next, row);
    } else {
      add<FIRST, COLUMN>(s, row);
      wait_for_sums<0>();
#pragma unroll
      for (int kk = 0; kk < S::kDim / 16; ++kk) pin(rows[kk]);
    }
  }
  // out of the 16 rows from `row` on; causal, of the 64 from FIRST on.
  template <int FIRST>
  CRATE_DEVICE void attend(int row) {
    take_rows(row);
    exact[0] = exact[1] = 0.0f;
    float s[width<0>() / 2];  // (64, width<0>()) per warp group
    start<width<0>()>(s, 0);
    walk<FIRST, 0>(s, row);
  }

  // Weighs a tile by its scores, and begins the products of the weights with the tokens of their columns, and with
  // ones. Causal, the tail's columns are no keys.
  template <int FIRST, int COLUMN>
  CRATE_DEVICE void add(float (&s)[width<COLUMN>() / 2], int row) {
    constexpr int kWidth = width<COLUMN>(), kTerms = kWidth / 16;
    constexpr bool kInTail = COLUMN >= 64 * S::kBlocks;
    if constexpr (kInTail) put_columns<COLUMN, kWidth, false>(s, row);
    if constexpr (!(S::kCausal && kInTail)) {
      weigh<COLUMN, kWidth, (S::kCausal && COLUMN >= FIRST)>(s, row);
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) exact[i % 4 / 2] += s[i];
      // The next tile waits for these sums: else the assembler adds them later, and keeps every weight until then.
      shift[0] += 0.0f * exact[0], shift[1] += 0.0f * exact[1];
      // The next scores are not waited for.
      if constexpr (COLUMN > 0) wait_for_sums<(next_column<FIRST, COLUMN>() < S::kRows)>();
      pack_sums<T, kWidth>(p, s);
      wgmma_fence();
      add_tokens<T, S::kDim, kTerms>(acc, p, w + COLUMN * kRowBytes, S::kPanel, COLUMN > 0);
#pragma unroll
      for (int kk = 0; kk < kTerms; ++kk) {
        Wgmma<T, 8>::template rs<false>(sum, p[kk], matrix_descriptor<Swizzle::kNone>(at.base + S::kOnes, 128, 128),
                                        COLUMN > 0 || kk > 0);
      }
      wgmma_commit();
    }
  }
  template <int UNFINISHED>
  CRATE_DEVICE void wait_for_sums() {
    wgmma_wait<UNFINISHED>();
    pin(acc), pin(sum);
#pragma unroll
    for (int kk = 0; kk < S::kFragments; ++kk) pin(p[kk]);
  }

  // Where the head's out and lse begin: kept in shared memory.
  CRATE_DEVICE T* out() const { return static_cast<T*>(call.out.data) + place_of(S::kPlaces); }
  CRATE_DEVICE float* lse() const { return call.lse + place_of(S::kPlaces + 8); }
  CRATE_DEVICE int64_t place_of(uint32_t from) const {
    const float2 bits = load_shared_2(at.base + from);
    return static_cast<int64_t>(static_cast<uint64_t>(__float_as_uint(bits.y)) << 32 | __float_as_uint(bits.x));
  }

  CRATE_DEVICE float lse_of(float total, float of) const { return (log2_fast(total) + of) * (1.0f / kLog2E); }

  // The columns of the tail's own rows: of the last 64 rows, those of the last warps.
  template <int FIRST>
  CRATE_DEVICE void put_tail() {
    if constexpr (FIRST < S::kTail) {
      constexpr int kBegin = 64 * S::kBlocks + FIRST, kWidth = width<kBegin>();
      float s[kWidth / 2];  // (64, kWidth) per warp group
      const int row = S::kRows - 64 + 16 * at.warp;
      start<kWidth>(s, kBegin);
      wgmma_wait<0>();
      pin(s);
      if (row >= 64 * S::kBlocks) put_columns<kBegin, kWidth, true>(s, row);
      put_tail<FIRST + kWidth>();
    }
  }

  // Leaves the warp's sums of the columns in shared memory.
  CRATE_DEVICE void put_sums() const {
    const int lane = at.lane();
#pragma unroll
    for (int kk = 0; kk < S::kTail / 16; ++kk) {
      const uint32_t partial = at.base + S::kPartials + kk * (16 * S::kThreads) + fresh(threadIdx.x) * 16;
      const uint4 bits = load_shared_4(partial);
      float sums[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], step);
        const int column = 16 * kk + i / 2 * 8 + (lane & 3) * 2 + i % 2;
        if (lane < 4) store_shared(at.base + S::kSums + 256 * at.warp + 4 * column, sums[i]);
      }
    }
  }
};

}  // namespace crate_kernels::mssa
