// Rows of fp32 from products in double, where the rounding of their scores shows in weights.
//
// A weight errs by the rounding of its score: a score of a hundred has terms whose sum errs by some 2^-17. Eager's errs
// likewise. But where a few rows have all of a head's error, eager's is by chance small, and ours by chance large.
#pragma once

#include "phi.h"
#include "results.h"

namespace {

// A score of so many nats has terms whose rounding shows in weights.
constexpr float kTallScore = 32.0f, kTallScoreBits = static_cast<float>(kTallScore * kLog2e);
// Largest score in bits. The rounding of more could be more than an exponential holds.
constexpr float kTallestScore = 0x1p16f;
// Rows of a block. Chance evens out among more, which are left as they are; of causal ones after these, as no row may
// depend on later ones.
constexpr int kMaxExactRows = 8;

constexpr int kRowsAtOnce = 4;
constexpr int kHalf = kLanes / 2;
typedef float HalfVf __attribute__((vector_size(CRATE_LANES * 2)));
typedef double Vd __attribute__((vector_size(CRATE_LANES * 4)));

CRATE_INLINE Vd load_double(const float* p) {
  HalfVf v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vd);
}

// The products of some rows of a panel with the columns of a tile.
CRATE_INLINE void exact_products(const Scores& s, const float* left, const int (&row)[kRowsAtOnce],
                                 double (&products)[kRowsAtOnce][kTile]) {
  double rows[256][kRowsAtOnce];
  for (int k = 0; k < s.words; ++k) {
    for (int q = 0; q < kRowsAtOnce; ++q) rows[k][q] = left[k * kTile + row[q]];
  }
  for (int n = 0; n < s.columns; n += kHalf) {
    Vd total[kRowsAtOnce] = {};
    for (int k = 0; k < s.words; ++k) {
      const Vd key = load_double(s.key_panel + k * kTile + n);
#pragma GCC unroll 4
      for (int q = 0; q < kRowsAtOnce; ++q) total[q] += key * rows[k][q];
    }
    for (int q = 0; q < kRowsAtOnce; ++q) memcpy(&products[q][n], &total[q], sizeof(Vd));
  }
  for (int n = round_up(s.columns, kHalf); n < round_up(s.columns, kLanes); ++n) {
    for (int q = 0; q < kRowsAtOnce; ++q) products[q][n] = 0.0;
  }
}

// Some rows of a block, with the values in `values`; uses a tile of weights.
template <class T>
class ExactRows {
 public:
  ExactRows(HeadTiles<T>& tiles, const float* values, WeightTile<T>& weight_tile)
      : tiles_(tiles), values_(values), weight_tile_(weight_tile) {}

  // True if some of a block's rows may show it, whose largest scores are `shift`, of which `tall` is kTallScore.
  static bool may_show(const MssaProblem& p, const float* shift, int count, float tall) {
    if (T::kPair != 1 || p.dtype != Dtype::f32 || p.threshold || p.range) return false;
    bool any = p.scale < 0;  // a token's score with itself may be taller than its row's largest
    for (int r = 0; r < count; ++r) any |= fabsf(shift[r]) >= tall;
    return any;
  }

  // Adds row r if its rounding shows: its largest score is `shift` bits, its token's with itself `own` bits, and its
  // weights are `total` times the largest. The terms of all its scores have about the size of the taller of the two.
  void add(int r, double shift, double own, float total) {
    const double height = fmax(fabs(shift), fabs(own));
    const bool shows = height >= kTallScoreBits && height <= kTallestScore && (total - 1.0f) * height >= 1.0;
    if (!shows || count_++ >= kMaxExactRows) return;
    row_[count_ - 1] = r;
    shift_[count_ - 1] = shift;
  }

  bool empty() const { return count_ == 0; }

  // Writes the results of the rows; cold, so that it is apart from what usual heads run. scores(j): of the block's tile
  // j. seen(s, r, n): which keys row r sees.
  template <class ScoresOf, class Seen>
  __attribute__((noinline, cold)) void write(const QueryBlock& b, const ScoresOf& scores, const Seen& seen) {
    const MssaProblem& p = tiles_.p;
    if (count_ > kMaxExactRows && hides_none(p.mask)) return;
    count_ = count_ < kMaxExactRows ? count_ : kMaxExactRows;
    alignas(64) float out[kMaxExactRows * 256], sums[kMaxExactRows * kLanes] = {}, totals[kMaxExactRows];
    int32_t token[kMaxExactRows];
    memset(out, 0, sizeof(float) * count_ * tiles_.row_width);
    for (int r = 0; r < count_; ++r) token[r] = b.token[row_[r]];
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      const Scores s = scores(j);
      for (int first = 0; first < count_; first += kRowsAtOnce) weigh(s, first, seen, sums);
      if (p.dropout) {
        dropout_factors(p, tiles_.head, token, count_, tiles_.keys.token + j * kTile, tiles_.dropout);
        transform_weights(p, nullptr, tiles_.dropout, count_, weight_tile_.by_row);
      }
      accumulate<T, Order::rows>(out, tiles_.row_width, count_, b.columns(j), weight_tile_, values_ + tiles_.rows_at(j),
                                 nullptr, nullptr, nullptr, tiles_.ahead);
    }
    for (int r = 0; r < count_; ++r) {
      totals[r] = sum(load(sums + r * kLanes));
      // Keys that are much longer than the row's token can put the largest score off by many bits.
      if (!(totals[r] >= 0.5f && totals[r] <= 0x1p32f)) continue;
      write_results(p, tiles_.head, tiles_.row_width,
                    {token + r, 1, out + r * tiles_.row_width, totals + r, totals + r, shift_ + r});
    }
  }

 private:
  template <class Seen>
  void weigh(const Scores& s, int first, const Seen& seen, float* sums) {
    int row[kRowsAtOnce];
    for (int q = 0; q < kRowsAtOnce; ++q) row[q] = row_[first + q < count_ ? first + q : first];
    alignas(64) double products[kRowsAtOnce][kTile];
    exact_products(s, s.query_panel, row, products);
    const double factor = tiles_.p.scale * kLog2e;
    for (int q = 0; q < kRowsAtOnce && first + q < count_; ++q) {
      const int r = first + q, columns = static_cast<int>(round_up(s.columns, kLanes));
      float* const weights = weight_tile_.by_row + r * kTile;
      for (int n = 0; n < columns; ++n) weights[n] = static_cast<float>(factor * products[q][n] - shift_[r]);
      for (int n = 0; n < columns; n += kLanes) {
        Vf weight = exp2(load(weights + n));
        if (s.first != nullptr) weight = select(seen(s, row[q], n), weight, Vf{});
        store(weights + n, weight);
        store(sums + r * kLanes, load(sums + r * kLanes) + weight);
      }
    }
  }

  HeadTiles<T>& tiles_;
  const float* values_;
  WeightTile<T>& weight_tile_;
  int count_ = 0;
  int row_[kMaxExactRows];
  double shift_[kMaxExactRows];
};

}  // namespace
