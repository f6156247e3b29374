// Forward of one head.
//
// Pair form (full attention, one thread per head): with h_i = S_ii / 2 and gamma_j = 2^(h_j - max h), the weights
// E_ij = 2^(S_ij - h_i - h_j) are symmetric, so a tile serves its rows and its columns: three products per pair of
// tiles. Row form (everything else): one block of queries against its keys, two products per tile, with a row shift
// that is a bound of its scores, or their maximum where the bound is too loose.
#pragma once

#include "short_forward.h"

namespace {

// Smallest sum of a row that is shifted by its bound. With less, differences to the bound round off bits of the scores.
constexpr float kMinSum = 0x1p-40f;

template <class T>
class Forward {
 public:
  Forward(const MssaProblem& p, const MssaHead& head, int part, int parts)
      : p_(p), head_(head), tiles_(p, head, part, parts) {}

  void run(Arena& arena) {
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    tiles_.fetch_ahead(head_.out, {&MssaHead::w});
    tiles_.keys.find(head_);
    tiles_.pack_keys(nullptr);
    const HalfNormRange extent(tiles_.half_norms, tiles_.keys.count);
    const bool paired = tiles_.parts == 1 && tiles_.pairs_allowed(extent);
    if (paired) pairs(extent.maximum);
    if (!paired || !tiles_.queries_are_keys()) rows(paired);
  }

 private:
  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile);
    tiles_.cut(s);
    values_ = s.floats(padded / T::kPair * tiles_.row_width);
    out_ = s.floats(padded * tiles_.row_width);
    sums_ = {s.floats(padded * kLanes), s.floats(padded)};
    if (T::kPair == 2) exact_sums_ = {s.floats(padded * kLanes), s.floats(padded)};
  }

  // Packs values times their mass. Without a mass, each token counts once.
  void pack_values(const float* mass) {
    for (int b = 0; b < tiles_.keys.blocks; ++b) {
      const int count = in_block(tiles_.keys.count, b);
      const float* const factor = mass == nullptr ? nullptr : mass + b * kTile;
      if constexpr (T::kPair == 1) {  // staged rows are packed rows
        stage(head_.keys, p_.dtype, p_.head_dim, tiles_.keys.token + b * kTile, count, factor, tiles_.row_width,
              values_ + tiles_.rows_at(b));
      } else {
        tiles_.stage_keys(b, count, factor);
        pack_rows<T>(tiles_.staging, staging_width(p_.head_dim), tiles_.row_width, count, values_ + tiles_.rows_at(b));
      }
    }
  }

  void pairs(float largest) {
    tiles_.pair_masses(largest);
    pack_values(tiles_.masses);
    memset(out_, 0, tiles_.keys.count * tiles_.row_width * sizeof(float));
    clear(sums_, tiles_.keys.count);
    if (T::kPair == 2) clear(exact_sums_, tiles_.keys.count);
    tiles_.for_each_pair([this](int i, int j) { pair(i, j); });
    for (int b = 0; b < tiles_.keys.blocks; ++b) {
      const int first = b * kTile;
      alignas(64) float totals[kTile], exact[kTile];
      double shifts[kTile];
      const int count = in_block(tiles_.keys.count, b);
      totals_of(sums_, first, count, totals);
      if (T::kPair == 2) totals_of(exact_sums_, first, count, exact);
      for (int n = 0; n < count; ++n) shifts[n] = whole_slope(tiles_.half_norms[first + n] + largest);
      write_results(p_, head_, tiles_.row_width,
                    {tiles_.keys.token + first, count, out_ + tiles_.rows_at(b) * T::kPair, totals,
                     T::kPair == 2 ? exact : totals, shifts});
    }
  }

  void pair(int i, int j) {
    Scores s = tiles_.pair_scores(i, j);
    alignas(64) float column[kTile] = {}, exact_column[kTile] = {};
    s.sums = sums_at(sums_, i, column);
    if (T::kPair == 2) s.exact_sums = sums_at(exact_sums_, i, exact_column);
    compute_weights<T>(s, weight_tile_);
    add_columns(sums_, j, column);
    if (T::kPair == 2) add_columns(exact_sums_, j, exact_column);
    accumulate<T, Order::columns>(out_ + static_cast<int64_t>(j) * kTile * tiles_.row_width, tiles_.row_width,
                                  s.columns, s.rows, weight_tile_, values_ + tiles_.rows_at(i), nullptr, nullptr,
                                  nullptr, tiles_.ahead);
    if (i != j) {
      accumulate<T, Order::rows>(out_ + static_cast<int64_t>(i) * kTile * tiles_.row_width, tiles_.row_width, s.rows,
                                 s.columns, weight_tile_, values_ + tiles_.rows_at(j), nullptr, nullptr, nullptr,
                                 tiles_.ahead);
    }
  }

  void rows(bool padded_only) {
    pack_values(nullptr);
    tiles_.unit_masses();
    tiles_.find_bounds_of_keys();
    tiles_.for_each_query_block(padded_only, [this](QueryBlock& b) { row_block(b); });
  }

  void row_block(QueryBlock& b) {
    const float* const queries = tiles_.pack_queries(b);
    tiles_.find_shifts(b, queries);
    if (!attend(b, queries)) {
      tiles_.shift_by_maxima(b, queries);
      attend(b, queries);
    }
  }

  // Computes a block. False, and nothing written, if a row has no key near its bound: its shift is NaN then.
  bool attend(QueryBlock& b, const float* queries) {
    alignas(64) float sums[kTile * kLanes] = {}, exact_sums[kTile * kLanes] = {};
    alignas(64) float out[kTile * 256];
    memset(out, 0, sizeof(float) * b.count * tiles_.row_width);
    alignas(64) float minimum[kTile];
    if (p_.threshold) {
      // Sums must be known before weights are compared with them: one pass only for the sums.
      for (int j = b.tiles.first; j < b.tiles.stop; ++j) row_tile(b, queries, j, sums, nullptr);
      for (int r = 0; r < b.count; ++r) minimum[r] = p_.level * sum(load(sums + r * kLanes));
    }
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      row_tile(b, queries, j, p_.threshold ? nullptr : sums, exact_sums);
      if constexpr (T::kPair == 1) {
        if (p_.dropout) dropout_factors(p_, head_, b.token, b.count, tiles_.keys.token + j * kTile, tiles_.dropout);
        if (p_.dropout || p_.threshold) {
          transform_weights(p_, minimum, p_.dropout ? tiles_.dropout : nullptr, b.count, weight_tile_.by_row);
        }
      }
      accumulate<T, Order::rows>(out, tiles_.row_width, b.count, b.columns(j), weight_tile_,
                                 values_ + tiles_.rows_at(j), nullptr, nullptr, nullptr, tiles_.ahead);
    }
    if (!head_.itself && lost(b, sums)) return false;
    alignas(64) float totals[kTile], exact[kTile];
    double shifts[kTile];
    const bool find_exact = b.shifted && ExactRows<T>::may_show(p_, b.shift, b.count, kTallScoreBits);
    ExactRows<T> exact_rows(tiles_, values_, weight_tile_);
    for (int r = 0; r < kTile; ++r) {
      const float total = b.has_keys(r) ? sum(load(sums + r * kLanes)) : 0.0f;
      exact[r] = T::kPair == 1 ? total : sum(load(exact_sums + r * kLanes));
      totals[r] = p_.threshold && b.has_keys(r) ? 1.0f : total;
      shifts[r] = whole_slope(static_cast<double>(b.shift[r]) + b.power[r]);
      if (find_exact && b.has_keys(r) && b.power[r] == 0.0f)
        exact_rows.add(r, b.shift[r], own_score(b.token[r]), total);
    }
    write_results(p_, head_, tiles_.row_width, {b.token, b.count, out, totals, exact, shifts});
    if constexpr (T::kPair == 1) {
      if (!exact_rows.empty()) exact_rows.write(b, [&](int j) { return tiles_.row_scores(b, queries, j); }, seen);
    }
    return true;
  }

  // The score in bits of a token with itself; 0 if it is no key, and with a scale above 0: its row's largest is then no
  // smaller.
  float own_score(int32_t token) const {
    const bool is_key = p_.scale < 0 && head_.itself && KeyList::is_key(head_, token);
    return is_key ? 2.0f * tiles_.half_norms[tiles_.keys.rank[token]] : 0.0f;
  }

  // True if weights are so small that they may have underflowed; marks the shifts of these rows.
  static bool lost(QueryBlock& b, const float* sums) {
    bool any = false;
    for (int r = 0; r < b.count; ++r) {
      if (!b.has_keys(r) || !(sum(load(sums + r * kLanes)) < kMinSum)) continue;
      b.shift[r] = NAN;
      any = true;
    }
    return any;
  }

  void row_tile(const QueryBlock& b, const float* queries, int j, float* sums, float* exact_sums) {
    Scores s = tiles_.row_scores(b, queries, j);
    s.sums.row = sums;
    if (T::kPair == 2) s.exact_sums.row = exact_sums;
    compute_weights<T>(s, weight_tile_);
  }

  const MssaProblem& p_;
  const MssaHead& head_;
  HeadTiles<T> tiles_;
  float *values_, *out_;
  TileSums sums_ = {}, exact_sums_ = {};
  WeightTile<T> weight_tile_;
};

template <class T>
void mssa_forward(const MssaProblem& p, const MssaHead& head, int part, int parts, Arena& arena) {
  [[maybe_unused]] const typename T::Registers registers;
  if (ShortForward<T>::serves(p, head, parts)) return ShortForward<T>(p, head, part, parts).run(arena);
  Forward<T>(p, head, part, parts).run(arena);
}

}  // namespace
