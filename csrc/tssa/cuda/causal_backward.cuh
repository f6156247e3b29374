// The causal form, backward: two scans from the last token to the first, over running sums summed again.
//
// A block has one chunk, a thread some channels of it. For steps that go backwards, the running sums are kept at every
// eighth token and added up from there. scan_chunks turns the sums of each step into those that the next step reads. As
// (read, written) in the passes and rows of full.cuh; a gradient of the membership is one row more:
//
//   step     passes  rows  leaves
//   totals   1, 0    1, 0  sums of Pi w^2, of w^2 and of Pi
//   dmoment  2, 0    1, 0  sums of dM / s, and V
//   dlogit   2, 0    1, 1  the gradient of the logits; sums of dc / temp; dtemp
//   dw       2, 1    2, 0  dw
//
// 7 reads and 1 write in 7 launches. If a sequence is one chunk, with nothing before or behind it: 4 and 1 in 2
// launches. The gradient of the bias takes one launch more, which reads a row. The chunks' sums are four sets of 4 /
// (itemsize * 32) of a pass each. There are no atomics: the order of every sum is fixed.
#pragma once

#include "causal.cuh"

namespace crate_kernels {

enum class TssaCausalBackwardStep { totals, dmoment, dlogit, dw };

constexpr int kBackTile = 4, kBackMark = 8;  // tokens
static_assert(kBackMark % kBackTile == 0, "a tile begins at a mark or whole tiles behind it");

// Shared memory: the running sums at every kBackMark-th token but the first, then sums and terms of a tile.
struct TssaCausalBackwardShared {
  int64_t moment, energy, mass, dmoment, denergy, ratio, partial, pairs, dmass, dtemp, bytes;

  CRATE_DEVICE TssaCausalBackwardShared(const TssaProblem& p, int count, bool logits) {
    const int64_t vectors = p.width / count, marks = (p.chunk_size - 1) / kBackMark, tile = logits ? kBackTile : 0;
    TssaShared s;
    moment = s.take<float>(marks * p.width);
    energy = s.take<float>(marks * p.width);
    mass = s.take<float>(marks * vectors);
    dmoment = s.take<float>(logits ? p.width : 0);
    denergy = s.take<float>(logits ? p.width : 0);
    ratio = s.take<float>(tile * p.width);
    partial = s.take<float>(3 * tile * vectors);
    pairs = s.take<float>(4 * tile * p.nheads);
    dmass = s.take<float>(p.nheads);
    dtemp = s.take<float>(p.nheads);
    bytes = s.bytes;
  }
};

// A block's tokens, and the sums before and behind them.
template <class Access>
struct TssaBackSide {
  static constexpr int N = Access::kCount;
  const TssaBackward& b;
  const Access& access;
  TssaSpan s;
  TssaTokens w, dout;
  TssaMask key_mask;
  TssaRows members;
  const float *moments, *energies, *masses;     // before the chunk, or null
  const float *dmoments, *dmasses, *denergies;  // behind the chunk, or null

  CRATE_DEVICE TssaBackSide(const TssaBackward& b, const Access& access) : b(b), access(access) {
    const TssaProblem& p = b.problem;
    s = chunk_of(p);
    w = part_of(p, b.w, s);
    dout = part_of(p, b.dout, s);
    key_mask = key_mask_of(p, s);
    members = rows_of(p, b.membership, s);
    moments = energies = masses = dmoments = dmasses = denergies = nullptr;
    if (b.sums_1 == nullptr) return;
    const int64_t chunk = static_cast<int64_t>(s.index) * (p.nchunks + 1) + s.chunk, size = p.width + p.nheads;
    moments = b.sums_1 + chunk * (size + p.width);
    energies = moments + p.width;
    masses = energies + p.width;
    dmoments = b.sums_2 + chunk * size;
    dmasses = dmoments + p.width;
    denergies = b.sums_3 + chunk * size;
  }

  // The elements of `count` tokens from the n-th on that dropout keeps; all of them without dropout.
  CRATE_DEVICE uint32_t kept(int n, int count, int h, int d) const {
    return b.problem.seed == nullptr ? ~0u : kept_by_dropout(b.problem, s.index, h, s.first + n, count, d, N);
  }

  // Loads token n's w, and its gradient times dropout's factor. Zeros behind the chunk's last token.
  CRATE_DEVICE void load(int n, int h, int d, uint32_t kept, float (&x)[N], float (&g)[N]) const {
    if (n >= s.rows()) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = g[i] = 0.0f;
      return;
    }
    access.load(w, n, h, d, x);
    access.load(dout, n, h, d, g);
    if (b.problem.seed == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= kept >> i & 1 ? b.problem.keep_factor : 0.0f;
  }

  CRATE_DEVICE float member(int n, int h) const { return n < s.rows() ? members(n, h) : 0.0f; }
  CRATE_DEVICE float counted(int n) const { return n < s.rows() ? enters_sums(key_mask, n) : 0.0f; }
};

// The running sums of some channels over the block's own tokens.
template <int N>
struct TssaRunning {
  float moment[N], energy[N], mass;  // channels of the thread's vector; of its head

  CRATE_DEVICE void add(const float (&x)[N], float member, float counted) {
    const float weight = member * counted;
    mass += weight;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float square = x[i] * x[i];
      moment[i] += square * weight;
      energy[i] += square * counted;
    }
  }
};

// Running sums before a tile. `mark` keeps them at every kBackMark-th token, and `before` adds up from there. A thread
// keeps those of its own channels.
template <class Access>
struct TssaMarks {
  static constexpr int N = Access::kCount;
  const TssaBackSide<Access>& side;
  float *moment, *energy, *mass;
  int vectors;

  CRATE_DEVICE TssaMarks(const TssaBackSide<Access>& side, const TssaCausalBackwardShared& layout) : side(side) {
    moment = shared_at<float>(layout.moment);
    energy = shared_at<float>(layout.energy);
    mass = shared_at<float>(layout.mass);
    vectors = side.b.problem.width / N;
  }

  // Tokens `first` to `last`, which are whole tiles.
  CRATE_DEVICE void add(TssaRunning<N>& sums, int first, int last, int h, int d) const {
    for (; first < last; first += kBackTile) {
      float x[kBackTile][N];  // (kBackTile tokens, N channels) per thread
#pragma unroll
      for (int r = 0; r < kBackTile; ++r) side.access.load(side.w, first + r, h, d, x[r]);
#pragma unroll
      for (int r = 0; r < kBackTile; ++r)
        sums.add(x[r], side.members(first + r, h), enters_sums(side.key_mask, first + r));
    }
  }

  CRATE_DEVICE void mark(int v, int h, int d) const {
    const int width = side.b.problem.width, column = h * side.b.problem.head_dim + d;
    TssaRunning<N> sums = {};
    for (int m = 0; (m + 1) * kBackMark < side.s.rows(); ++m) {
      add(sums, m * kBackMark, (m + 1) * kBackMark, h, d);
      mass[m * vectors + v] = sums.mass;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        moment[m * width + column + i] = sums.moment[i];
        energy[m * width + column + i] = sums.energy[i];
      }
    }
  }

  CRATE_DEVICE TssaRunning<N> before(int tile, int v, int h, int d) const {
    const int width = side.b.problem.width, column = h * side.b.problem.head_dim + d, m = tile / kBackMark - 1;
    TssaRunning<N> sums = {};
    if (m >= 0) {
      sums.mass = mass[m * vectors + v];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums.moment[i] = moment[m * width + column + i];
        sums.energy[i] = energy[m * width + column + i];
      }
    }
    add(sums, (m + 1) * kBackMark, tile, h, d);
    return sums;
  }
};

// g A, dM / s, and s times the term of V, for one channel of a token.
struct TssaThrough {
  float gate, slope, dmass;
};

CRATE_DEVICE TssaThrough through_moment(float x, float g, float member, float moment, float mass) {
  const float inverse = 1.0f / (moment + mass), gate = g * inverse * mass, slope = gate * x * inverse * member;
  return {gate, slope, -slope * moment};
}

// A tile of the backward scan for one vector of channels: tokens, gradients, and the running sums at each token.
template <class Access>
struct TssaBackTokens {
  static constexpr int N = Access::kCount;
  // (kBackTile tokens, N channels) per thread; of its head
  float x[kBackTile][N], g[kBackTile][N], moment[kBackTile][N], energy[kBackTile][N], mass[kBackTile];

  CRATE_DEVICE TssaBackTokens(const TssaBackSide<Access>& side, const TssaMarks<Access>& marks, int tile, int v, int h,
                              int d) {
    const int column = h * side.b.problem.head_dim + d;
    const uint32_t kept = side.kept(tile, kBackTile, h, d);
    TssaRunning<N> sums = marks.before(tile, v, h, d);
    const float mass_before = at_or_zero(side.masses, h) + kMassFloor;
#pragma unroll
    for (int r = 0; r < kBackTile; ++r) {
      side.load(tile + r, h, d, kept >> r * N, x[r], g[r]);
      sums.add(x[r], side.member(tile + r, h), side.counted(tile + r));
      mass[r] = mass_before + sums.mass;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        moment[r][i] = at_or_zero(side.moments, column + i) + sums.moment[i];
        energy[r][i] = at_or_zero(side.energies, column + i) + sums.energy[i];
      }
    }
  }
};

}  // namespace crate_kernels
