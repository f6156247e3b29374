// Forward of one head.
//
// Pair form (full attention, one thread per head): with h_i = S_ii / 2 and gamma_j = 2^(h_j - max h), the weights
// E_ij = 2^(S_ij - h_i - h_j) are symmetric, so a tile serves its rows and its columns: three products per pair of
// tiles. Row form (everything else): one block of queries against its keys, two products per tile, with a row shift
// that is a bound of its scores, or their maximum where the bound is too loose.
#pragma once

#include "phi.h"
#include "results.h"
#include "short_forward.h"

namespace {

// Least sum of a row that is shifted by its bound. With less, differences to the bound round off bits of the scores.
constexpr float kLeastSum = 0x1p-40f;

template <class T>
class Forward : HeadTiles<T> {
  using Base = HeadTiles<T>;
  using Base::half_norm_, Base::mass_, Base::staging_, Base::dropout_;
  using Base::p_, Base::head_, Base::keys_, Base::width_, Base::parts_, Base::rows_at, Base::ahead_;

 public:
  using Base::Base;

  void run(Arena& arena) {
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    Base::fetch_ahead(head_.out, {&MssaHead::w});
    keys_.find(head_);
    Base::pack_keys(nullptr);
    const HalfNormRange extent(half_norm_, keys_.count);
    const bool paired = parts_ == 1 && Base::pairs_allowed(extent);
    if (paired) pairs(extent.most);
    if (!paired || !Base::queries_are_keys()) rows(paired);
  }

 private:
  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile);
    Base::cut(s);
    values_ = s.floats(padded / T::kPair * width_);
    out_ = s.floats(padded * width_);
    sums_ = {s.floats(padded * kLanes), s.floats(padded)};
    if (T::kPair == 2) exact_sums_ = {s.floats(padded * kLanes), s.floats(padded)};
  }

  // Packs values times their mass. Without a mass, each token counts once.
  void pack_values(const float* mass) {
    for (int b = 0; b < keys_.blocks; ++b) {
      const int count = in_block(keys_.count, b);
      const float* const factor = mass == nullptr ? nullptr : mass + b * kTile;
      if constexpr (T::kPair == 1) {  // staged rows are packed rows
        stage(head_.keys, p_.dtype, p_.head_dim, keys_.token + b * kTile, count, factor, width_, values_ + rows_at(b));
      } else {
        Base::stage_keys(b, count, factor);
        pack_rows<T>(staging_, staging_width(p_.head_dim), width_, count, values_ + rows_at(b));
      }
    }
  }

  void pairs(float largest) {
    Base::pair_masses(largest);
    pack_values(mass_);
    memset(out_, 0, keys_.count * width_ * sizeof(float));
    clear(sums_, keys_.count);
    if (T::kPair == 2) clear(exact_sums_, keys_.count);
    Base::for_each_pair([this](int i, int j) { pair(i, j); });
    for (int b = 0; b < keys_.blocks; ++b) {
      const int first = b * kTile;
      alignas(64) float totals[kTile], exact[kTile];
      double shifts[kTile];
      const int count = in_block(keys_.count, b);
      totals_of(sums_, first, count, totals);
      if (T::kPair == 2) totals_of(exact_sums_, first, count, exact);
      for (int n = 0; n < count; ++n) shifts[n] = whole_slope(half_norm_[first + n] + largest);
      write_results(
          p_, head_, width_,
          {keys_.token + first, count, out_ + rows_at(b) * T::kPair, totals, T::kPair == 2 ? exact : totals, shifts});
    }
  }

  void pair(int i, int j) {
    Scores s = Base::pair_scores(i, j);
    alignas(64) float column[kTile] = {}, exact_column[kTile] = {};
    s.sums = sums_at(sums_, i, column);
    if (T::kPair == 2) s.exact_sums = sums_at(exact_sums_, i, exact_column);
    compute_weights<T>(s, tile_);
    add_columns(sums_, j, column);
    if (T::kPair == 2) add_columns(exact_sums_, j, exact_column);
    accumulate<T, Order::columns>(out_ + static_cast<int64_t>(j) * kTile * width_, width_, s.columns, s.rows, tile_,
                                  values_ + rows_at(i), nullptr, nullptr, nullptr, ahead_);
    if (i != j) {
      accumulate<T, Order::rows>(out_ + static_cast<int64_t>(i) * kTile * width_, width_, s.rows, s.columns, tile_,
                                 values_ + rows_at(j), nullptr, nullptr, nullptr, ahead_);
    }
  }

  void rows(bool padded_only) {
    pack_values(nullptr);
    Base::unit_masses();
    Base::find_bounds_of_keys();
    Base::for_each_query_block(padded_only, [this](Block& b) { row_block(b); });
  }

  void row_block(Block& b) {
    const float* const queries = Base::query_panel(b);
    Base::find_shifts(b, queries);
    if (!attend(b, queries)) {
      Base::shift_by_maxima(b, queries);
      attend(b, queries);
    }
  }

  // Computes a block. False, and nothing written, if a row has no key near its bound: its shift is NaN then.
  bool attend(Block& b, const float* queries) {
    alignas(64) float sums[kTile * kLanes] = {}, exact_sums[kTile * kLanes] = {};
    alignas(64) float out[kTile * 256];
    memset(out, 0, sizeof(float) * b.count * width_);
    alignas(64) float least[kTile];
    if (p_.threshold) {
      // Sums must be known before weights are compared with them: one pass for the sums alone.
      for (int j = b.tiles.first; j < b.tiles.stop; ++j) row_tile(b, queries, j, sums, nullptr);
      for (int r = 0; r < b.count; ++r) least[r] = p_.level * sum(load(sums + r * kLanes));
    }
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      row_tile(b, queries, j, p_.threshold ? nullptr : sums, exact_sums);
      if constexpr (T::kPair == 1) {
        if (p_.dropout) dropout_factors(p_, head_, b.token, b.count, keys_.token + j * kTile, dropout_);
        if (p_.dropout || p_.threshold) {
          transform_weights(p_, least, p_.dropout ? dropout_ : nullptr, b.count, tile_.by_row);
        }
      }
      accumulate<T, Order::rows>(out, width_, b.count, b.columns(j), tile_, values_ + rows_at(j), nullptr, nullptr,
                                 nullptr, ahead_);
    }
    if (!head_.itself && lost(b, sums)) return false;
    alignas(64) float totals[kTile], exact[kTile];
    double shifts[kTile];
    for (int r = 0; r < kTile; ++r) {
      const float total = b.has_keys(r) ? sum(load(sums + r * kLanes)) : 0.0f;
      exact[r] = T::kPair == 1 ? total : sum(load(exact_sums + r * kLanes));
      totals[r] = p_.threshold && b.has_keys(r) ? 1.0f : total;
      shifts[r] = whole_slope(static_cast<double>(b.shift[r]) + b.power[r]);
    }
    write_results(p_, head_, width_, {b.token, b.count, out, totals, exact, shifts});
    return true;
  }

  // True if weights are so small that they may have underflowed; marks the shifts of these rows.
  static bool lost(Block& b, const float* sums) {
    bool any = false;
    for (int r = 0; r < b.count; ++r) {
      if (!b.has_keys(r) || !(sum(load(sums + r * kLanes)) < kLeastSum)) continue;
      b.shift[r] = NAN;
      any = true;
    }
    return any;
  }

  void row_tile(const Block& b, const float* queries, int j, float* sums, float* exact_sums) {
    Scores s = Base::row_scores(b, queries, j);
    s.sums.row = sums;
    if (T::kPair == 2) s.exact_sums.row = exact_sums;
    compute_weights<T>(s, tile_);
  }

  float *values_, *out_;
  TileSums sums_ = {}, exact_sums_ = {};
  WeightTile<T> tile_;
};

template <class T>
void mssa_forward(const MssaProblem& p, const MssaHead& head, int part, int parts, Arena& arena) {
  [[maybe_unused]] const typename T::Registers registers;
  if (ShortForward<T>::serves(p, head, parts)) return ShortForward<T>(p, head, part, parts).run(arena);
  Forward<T>(p, head, part, parts).run(arena);
}

}  // namespace
