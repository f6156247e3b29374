// The backward of whole heads on sm_90a: every token of a head is in shared memory, which is read and written once.
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

#include "hopper_tile.cuh"

namespace crate_kernels::mssa {

// Strides in elements; channels are consecutive, and rows begin at multiples of 16 bytes.
struct HeadTokens {
  void* data;
  int64_t batch, head, row;
};

struct HeadCall {
  HeadTokens w, g, out, dw;
  const float *lse, *dlse;    // (batch, nheads, seqlen), packed (nheads, total); dlse null: no gradient
  const uint8_t* keep;        // (batch, seqlen); null: every token is a key
  const int32_t* cu_seqlens;  // (batch + 1,); null: not packed
  uint8_t* refused;           // for every head: 1 if it is left to other kernels
  int32_t heads, nheads, seqlen, total, head_dim;  // heads: batch * nheads
  float scale;
};

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

constexpr float kLog2E = 1.44269504f;
constexpr int kAllThreads = 1;  // named barrier

// Where the block's shared memory begins, and a thread's place. The lane is asked for where it is used, and what
// follows from it computed there: registers are few.
struct HeadPlace {
  uint32_t base;
  int group, warp;
  CRATE_DEVICE int lane() const { return fresh(threadIdx.x) & 31; }
};

// A head of the call: where its tokens begin, and how many there are.
struct HeadTokensOf {
  int length, sequence;
  int64_t numbers;  // before its first lse
  int64_t start;    // packed: of its sequence
  int head;

  CRATE_DEVICE HeadTokensOf(const HeadCall& call, int index) {
    sequence = index / call.nheads, head = index % call.nheads;
    start = 0, length = call.seqlen;
    numbers = static_cast<int64_t>(index) * call.seqlen;
    if (call.cu_seqlens != nullptr) {
      const int first = min(max(call.cu_seqlens[sequence], 0), call.total);
      start = first;
      length = min(max(min(call.cu_seqlens[sequence + 1], call.total) - first, 0), call.seqlen);
      numbers = static_cast<int64_t>(head) * call.total + first;
    }
  }
  template <class T>
  CRATE_DEVICE T* of(const HeadCall& call, const HeadTokens& tokens) const {
    const int64_t before = call.cu_seqlens != nullptr ? start * tokens.row : sequence * tokens.batch;
    return static_cast<T*>(tokens.data) + before + head * tokens.head;
  }
  CRATE_DEVICE const uint8_t* keep(const HeadCall& call) const {
    return call.keep == nullptr ? nullptr : call.keep + static_cast<int64_t>(sequence) * call.seqlen;
  }
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

// Copies the tokens of a head; rows beyond its length, and channels beyond head_dim, are 0.
template <class S>
CRATE_DEVICE void load_head(const HeadCall& call, int index, uint32_t stage) {
  using T = typename S::T;
  const HeadTokensOf head(call, index);
  const int id = fresh(threadIdx.x), chunk = id & 7;
  const T *const w = head.of<const T>(call, call.w), *const g = head.of<const T>(call, call.g);
  const uint8_t* const keep = head.keep(call);
#pragma unroll 1
  for (int row = id >> 3; row < S::kRows; row += S::kThreads / 8) {
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      const int channel = 64 * panel + 8 * chunk;
      const bool there = row < head.length && channel < call.head_dim;
      const uint32_t to = stage + panel * S::kPanel + chunk_at(row, chunk);
      const int64_t from = there ? channel : 0, at = there ? row : 0;
      copy_async_16(to, w + at * call.w.row + from, there);
      copy_async_16(to + S::kTokens, g + at * call.g.row + from, there);
      if constexpr (S::kMasked) {
        copy_async_16(to + 2 * S::kTokens, w + at * call.w.row + from, there && keep[row]);
      }
    }
  }
}

// The factor, a power of two, that makes the largest |g| of a head kLargest; 1 if there is none.
template <class S>
CRATE_DEVICE float gradient_unit(const HeadPlace& place, uint32_t g) {
  using T = typename S::T;
  const int id = fresh(threadIdx.x);
  float most = 0.0f;
#pragma unroll 1
  for (int n = id; n < S::kRows * 8 * S::kPanels; n += S::kThreads) {
    const uint4 bits = load_shared_4(g + 16 * n);
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    unroll<4>([&](int i) {
      const float2 pair = unpack_pair<T>(pairs[i]);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    });
  }
  most = warp_max(most);
  if (place.lane() == 0) store_shared(place.base + S::kNumbers + 128 + 4 * (id >> 5), most);
  barrier_sync(kAllThreads, S::kThreads);
#pragma unroll
  for (int n = 0; n < S::kThreads / 32; ++n) most = fmaxf(most, load_shared(place.base + S::kNumbers + 128 + 4 * n));
  const uint32_t exponent = __float_as_uint(most) & 0x7f800000u;
  if (most == 0.0f || exponent == 0x7f800000u) return 1.0f;
  return S::kLargest * __uint_as_float(0x7f000000u - exponent);
}

// g becomes g^ in place, and d^ and what says whether a row is a key are written. Returns whether the rounding of out
// would show in dw, in some row: mma_shift.cuh has the measure of it. A row whose own weight is nearly all has its
// token as out, with nothing rounded.
template <class S>
CRATE_DEVICE bool scale_gradients(const HeadCall& call, const HeadTokensOf& head, const HeadPlace& place, uint32_t w,
                                  float c, float unit) {
  using T = typename S::T;
  constexpr float kMostRounding = 2.0f;  // in units of kDeviation eps and of the largest |g| of a warp's rows
  constexpr float kDeviation = 0.2f, kEps = S::kHalf ? 0x1p-10f : 0x1p-7f;
  const uint32_t g = w + S::kTokens;
  const int id = fresh(threadIdx.x), chunk = id & 7;
  const T* const out = head.of<const T>(call, call.out);
  const uint8_t* const keep = head.keep(call);
  bool shows = false;
#pragma unroll 1
  for (int first = 0; first < S::kRows; first += S::kThreads / 8) {
    const int row = first + (id >> 3);
    const bool there = row < head.length;
    float inverse = 0.0f, sum = 0.0f, squares = 0.0f, own = 0.0f, most_out = 0.0f, most_g = 0.0f;
    const float lse = there ? call.lse[head.numbers + row] : -INFINITY;
    if (lse != -INFINITY) inverse = exp2_fast(c - lse * kLog2E) * unit;
    if (row < S::kRows) {
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        const int channel = 64 * panel + 8 * chunk;
        const uint32_t at = g + panel * S::kPanel + chunk_at(row, chunk);
        uint4 bits = load_shared_4(at), outs = {0, 0, 0, 0};
        if (there && channel < call.head_dim) {
          outs = *reinterpret_cast<const uint4*>(out + row * call.out.row + channel);
        }
        uint32_t* const pairs[4] = {&bits.x, &bits.y, &bits.z, &bits.w};
        const uint4 token = load_shared_4(at - S::kTokens);
        const uint32_t of_out[4] = {outs.x, outs.y, outs.z, outs.w};
        const uint32_t of_w[4] = {token.x, token.y, token.z, token.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpack_pair<T>(of_w[i]);
          own += x.x * x.x + x.y * x.y;
          const float2 before = unpack_pair<T>(*pairs[i]), o = unpack_pair<T>(of_out[i]);
          *pairs[i] = pack_pair<T>(before.x * inverse, before.y * inverse);
          const float2 after = unpack_pair<T>(*pairs[i]);
          sum += after.x * o.x + after.y * o.y;
          squares += before.x * o.x * (before.x * o.x) + before.y * o.y * (before.y * o.y);
          most_out = fmaxf(most_out, fmaxf(fabsf(o.x), fabsf(o.y)));
          most_g = fmaxf(most_g, fmaxf(fabsf(before.x), fabsf(before.y)));
        }
        store_shared_4(at, bits);
      }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
      squares += __shfl_xor_sync(kAllLanes, squares, step);
      own += __shfl_xor_sync(kAllLanes, own, step);
      most_out = fmaxf(most_out, __shfl_xor_sync(kAllLanes, most_out, step));
    }
    most_g = warp_max(most_g);
    const float reach = fabsf(call.scale) * most_out * sqrtf(squares), most = kMostRounding * most_g;
    if (reach > most) {
      const float rest = fmaxf(lse - call.scale * own, 0.0f) + 0x1p-23f * fabsf(lse);
      const bool is_key = !S::kMasked || (there && keep[row]);
      shows |= !is_key || 2.0f * rest * reach > kDeviation * kEps * most;
    }
    if (chunk == 0 && row < S::kRows) {
      if (call.dlse != nullptr && there) sum -= call.dlse[head.numbers + row] * inverse;
      store_shared(place.base + S::kDeltas + 4 * row, sum);
      if constexpr (S::kMasked) store_shared(place.base + S::kKeeps + 4 * row, there && keep[row] ? 1.0f : 0.0f);
    }
  }
  return shows;
}

// The rows of the tail: sum over all rows of A w and E g^, as channels times tokens.
template <class S>
CRATE_DEVICE void add_tail(const HeadCall& call, const HeadTokensOf& head, const HeadGradient<S>& gradient,
                           float back) {
  using T = typename S::T;
  constexpr int kFirst = 64 * S::kBlocks;
  const HeadPlace at = gradient.at;
  float sums[S::kPanels][S::kTail / 2];
  const auto add = [&](auto panel) {
    constexpr int kPanel = decltype(panel)::value;
    const uint32_t channels = kPanel * S::kPanel;
#pragma unroll
    for (int kk = 0; kk < S::kRows / 16; ++kk) {
      Wgmma<T, S::kTail>::template ss<true, true>(
          sums[kPanel], advance(matrix_descriptor(gradient.w + channels, 0, 1024), 2048 * kk),
          Columns<S::kTail>::descriptor(at.base + S::kAColumns, 16 * kk), kk > 0);
      Wgmma<T, S::kTail>::template ss<true, true>(
          sums[kPanel], advance(matrix_descriptor(gradient.w + S::kTokens + channels, 0, 1024), 2048 * kk),
          Columns<S::kTail>::descriptor(at.base + S::kEColumns, 16 * kk), true);
    }
  };
  wgmma_fence();
  add(std::integral_constant<int, 0>{});
  if constexpr (S::kPanels > 1) add(std::integral_constant<int, 1>{});
  wgmma_commit();
  wgmma_wait<0>();
  T* const dw = head.of<T>(call, call.dw);
  const int lane = at.lane();
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
    pin(sums[panel]);
#pragma unroll
    for (int i = 0; i < S::kTail / 2; ++i) {
      const int row = kFirst + i / 4 * 8 + (lane & 3) * 2 + i % 2;
      const int channel = 64 * panel + 16 * at.warp + (lane >> 2) + i % 4 / 2 * 8;
      if (row < head.length && channel < call.head_dim) {
        dw[row * call.dw.row + channel] = from_float<T>(sums[panel][i] * back);
      }
    }
  }
}

template <class T, int DIM, int ROWS, bool MASKED>
__global__ void __launch_bounds__(HeadShape<T, DIM, ROWS, MASKED>::kThreads, 1)
    head_backward_kernel(const __grid_constant__ HeadCall call) {
  using S = HeadShape<T, DIM, ROWS, MASKED>;
  constexpr int kWarps = S::kThreads / 32;
  const uint32_t base = shared_address(aligned_shared_memory());
  const HeadPlace place = {base, __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 7), 0),
                           __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5 & 3), 0)};
  int index = blockIdx.x;
  uint32_t stage = base;
  if (index < call.heads) load_head<S>(call, index, stage);
  copy_async_commit();
#pragma unroll 1
  while (index < call.heads) {
    const int next = index + gridDim.x;
    const HeadTokensOf head(call, index);
    // The largest lse bounds every score of a key.
    const int id = fresh(threadIdx.x);
    float most = -INFINITY, least = INFINITY;
    if (id < head.length) {
      const float lse = call.lse[head.numbers + id] * kLog2E;
      if (lse != -INFINITY) most = least = lse;
    }
    most = warp_max(most), least = -warp_max(-least);
    if (place.lane() == 0) {
      store_shared(place.base + S::kNumbers + 8 * (id >> 5), most);
      store_shared(place.base + S::kNumbers + 8 * (id >> 5) + 4, least);
    }
    copy_async_wait<0>();
    barrier_sync(kAllThreads, S::kThreads);
    if (S::kStages == 2) {
      if (next < call.heads) load_head<S>(call, next, 2 * base + S::kStage - stage);
      copy_async_commit();
    }
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      const float2 of_warp = load_shared_2(place.base + S::kNumbers + 8 * n);
      most = fmaxf(most, of_warp.x), least = fminf(least, of_warp.y);
    }
    const bool none = most == -INFINITY;  // no row has a key
    const float c = none ? 0.0f : most - S::kTop;
    // A NaN of lse, or one that is infinite, is left to others too.
    const bool fits = none || most - least <= S::kSpread;
    float unit = 1.0f;
    if (fits) {
      if constexpr (S::kHalf) unit = gradient_unit<S>(place, stage + S::kTokens);
      HeadGradient<S> gradient = {place, stage, 0, call.scale * kLog2E, c, call.scale, {}, {}, {}, {}, {}};
      const bool shows = scale_gradients<S>(call, head, place, stage, c, unit);
      fence_async_shared();
      barrier_sync(kAllThreads, S::kThreads);  // the warps' numbers have been read, too
      const bool of_warp = __ballot_sync(kAllLanes, shows) != 0;
      if (place.lane() == 0) store_shared(place.base + S::kNumbers + 192 + 4 * (id >> 5), of_warp ? 1.0f : 0.0f);
      barrier_sync(kAllThreads, S::kThreads);
      bool sums = false;
#pragma unroll
      for (int n = 0; n < kWarps; ++n) sums = sums || load_shared(place.base + S::kNumbers + 192 + 4 * n) != 0.0f;
      if (sums) {
#pragma unroll 1
        for (int tail = 0; tail <= (S::kTail > 0 && place.group == 0); ++tail) {
          gradient.sum_deltas(call, index, tail ? S::kRows - 64 : 64 * place.group, tail, unit);
        }
        barrier_sync(kAllThreads, S::kThreads);
      }
      gradient.left = stage + 64 * place.group * kRowBytes;
      const int row = 64 * place.group + 16 * place.warp + (place.lane() >> 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        gradient.delta[half] = load_shared(place.base + S::kDeltas + 4 * (row + 8 * half));
        gradient.keep[half] = S::kMasked ? load_shared(place.base + S::kKeeps + 4 * (row + 8 * half)) : 1.0f;
      }
      {
        constexpr int kWidth = HeadGradient<S>::template width<0>();
        float s[kWidth / 2], t[kWidth / 2];
        gradient.template start<kWidth>(s, t, 0);
        gradient.template walk<0>(s, t);
      }
      const uint32_t own = base + S::kStagingAt + (place.group * 4 + place.warp) * S::kPanels * 16 * kRowBytes;
      stage_rows<T, DIM>(own, gradient.acc, 1.0f / unit, 1.0f / unit, place.lane());
      __syncwarp();
      const HeadTokensOf own_head(call, fresh(index));
      T* const dw = own_head.of<T>(call, call.dw);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int of_warp = 4 * n + (place.lane() >> 3), chunk = place.lane() & 7;
        const int to = 64 * place.group + 16 * place.warp + of_warp;
#pragma unroll
        for (int panel = 0; panel < S::kPanels; ++panel) {
          const int channel = 64 * panel + 8 * chunk;
          if (to < own_head.length && channel < call.head_dim) {
            *reinterpret_cast<uint4*>(dw + to * call.dw.row + channel) =
                load_shared_4(own + panel * 16 * kRowBytes + chunk_at(of_warp, chunk));
          }
        }
      }
      if constexpr (S::kTail > 0) {
        const bool mine = place.group == index % S::kBlocks;
        if (mine) gradient.put_tail();
        fence_async_shared();
        barrier_sync(kAllThreads, S::kThreads);
        if (mine) add_tail<S>(call, HeadTokensOf(call, fresh(index)), gradient, 1.0f / unit);
      }
    }
    if (threadIdx.x == 0) call.refused[index] = !fits;
    barrier_sync(kAllThreads, S::kThreads);  // before anything of this head is written over
    if (S::kStages == 2) {
      stage = 2 * base + S::kStage - stage;
    } else {
      if (next < call.heads) load_head<S>(call, next, stage);
      copy_async_commit();
    }
    index = next;
  }
  copy_async_wait<0>();
}

}  // namespace crate_kernels::mssa
