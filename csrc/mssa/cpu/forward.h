// Forward of one head.
//
// Pair form (full attention, one thread per head): with h_i = S_ii / 2 and gamma_j = 2^(h_j - max h), the weights
// E_ij = 2^(S_ij - h_i - h_j) are symmetric, so a tile serves its rows and its columns: three products per pair of
// tiles. Row form (everything else): one block of queries against its keys, two products per tile, with a row shift
// that is a bound of its scores, or their maximum where the bound is too loose.
#pragma once

#include "head.h"

namespace {

template <class T>
class Forward : Head<T> {
  using Base = Head<T>;
  using Base::key_panels_, Base::half_norm_, Base::mass_, Base::staging_;
  using Base::p_, Base::head_, Base::keys_, Base::width_, Base::words_, Base::factor_, Base::parts_;
  using Base::panel_at, Base::rows_at, Base::at, Base::add_columns, Base::clear, Base::total_of;

 public:
  using Base::Base;

  void run(Arena& arena) {
    Scratch counting(nullptr);
    cut(counting);
    Scratch scratch(arena.reserve(counting.used()));
    cut(scratch);
    keys_.find(head_);
    pack_keys();
    float largest;
    const bool safe = safe_spread(half_norm_, keys_.count, &largest);
    if (parts_ == 1 && safe && keys_.count > 1 && Base::pairs_allowed()) {
      pairs(largest);
      if (keys_.count < head_.seqlen) rows(/*padded_only=*/true);
    } else {
      rows(/*padded_only=*/false);
    }
  }

 private:
  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.seqlen, kTile), blocks = padded / kTile;
    keys_.token = s.ints(padded);
    keys_.rank = s.ints(head_.seqlen);
    key_panels_ = s.floats(blocks * panel_size<T>(p_.head_dim));
    values_ = s.floats(padded / T::kPair * width_);
    out_ = s.floats(padded * width_);
    half_norm_ = s.floats(padded);
    mass_ = s.floats(padded);
    running_ = s.floats(padded);
    sums_ = {s.floats(padded * kLanes), s.floats(padded)};
    if (T::kPair == 2) exact_sums_ = {s.floats(padded * kLanes), s.floats(padded)};
    query_panel_ = s.floats(panel_size<T>(p_.head_dim));
    staging_ = s.floats(kTile * staging_width(p_.head_dim));
    dropout_ = s.floats(p_.dropout ? kTile * kTile : 0);
  }

  void pack_keys() {
    const int64_t width = staging_width(p_.head_dim);
    for (int b = 0; b < keys_.blocks; ++b) {
      const int count = in_block(keys_.count, b);
      stage(head_.w, p_.dtype, p_.head_dim, keys_.token + b * kTile, count, nullptr, width, staging_);
      pack_panel<T>(staging_, width, p_.head_dim, count, key_panels_ + panel_at(b));
      for (int n = 0; n < round_up(count, kLanes); ++n) {
        half_norm_[b * kTile + n] = half_norm(staging_ + n * width, width, factor_);
      }
    }
  }

  // Packs values times their mass. Without a mass, each token counts once.
  void pack_values(const float* mass) {
    const int64_t width = staging_width(p_.head_dim);
    for (int b = 0; b < keys_.blocks; ++b) {
      const int count = in_block(keys_.count, b);
      const float* const factor = mass == nullptr ? nullptr : mass + b * kTile;
      if constexpr (T::kPair == 1) {  // staged rows are packed rows
        stage(head_.w, p_.dtype, p_.head_dim, keys_.token + b * kTile, count, factor, width_, values_ + rows_at(b));
      } else {
        stage(head_.w, p_.dtype, p_.head_dim, keys_.token + b * kTile, count, factor, width, staging_);
        pack_rows<T>(staging_, width, width_, count, values_ + rows_at(b));
      }
    }
  }

  void pairs(float largest) {
    const int64_t padded = keys_.blocks * kTile;
    Base::pair_masses(largest);
    pack_values(mass_);
    memset(out_, 0, padded * width_ * sizeof(float));
    clear(sums_, padded);
    if (T::kPair == 2) clear(exact_sums_, padded);
    Base::for_each_pair([this](int i, int j) { pair(i, j); });
    for (int n = 0; n < keys_.count; ++n) {
      const float total = total_of(sums_, n), exact = T::kPair == 2 ? total_of(exact_sums_, n) : total;
      finish(keys_.token[n], out_ + static_cast<int64_t>(n) * width_, total, exact, half_norm_[n] + largest);
    }
  }

  void pair(int i, int j) {
    const int rows = in_block(keys_.count, i), columns = in_block(keys_.count, j);
    Scores s = Base::pair_scores(i, j);
    alignas(64) float column[kTile] = {}, exact_column[kTile] = {};
    s.sums = at(sums_, i, column);
    if (T::kPair == 2) s.exact_sums = at(exact_sums_, i, exact_column);
    compute_weights<T>(s, tile_);
    add_columns(sums_, j, column);
    if (T::kPair == 2) add_columns(exact_sums_, j, exact_column);
    accumulate<T, ByColumn>(out_ + static_cast<int64_t>(j) * kTile * width_, width_, columns, rows, tile_,
                            values_ + rows_at(i), nullptr, nullptr, nullptr);
    if (i != j) {
      accumulate<T, ByRow>(out_ + static_cast<int64_t>(i) * kTile * width_, width_, rows, columns, tile_,
                           values_ + rows_at(j), nullptr, nullptr, nullptr);
    }
  }

  void rows(bool padded_only) {
    pack_values(nullptr);
    Base::unit_masses();
    // The largest h up to each key bounds every score that a causal row has.
    for (int n = 0; n < keys_.count; ++n) {
      running_[n] = n > 0 && running_[n - 1] > half_norm_[n] ? running_[n - 1] : half_norm_[n];
    }
    Base::for_each_query_block(padded_only, [this](Block& b) { row_block(b); });
  }

  void row_block(Block& b) {
    bool bounded = true;
    for (int r = 0; r < kTile; ++r) {
      const int32_t rank = keys_.rank[b.token[r]];
      const float bound = b.limit[r] > 0 ? running_[b.limit[r] - 1] : 0.0f;
      // One key alone has weight 1 exactly, and its score is the lse.
      const bool safe = p_.scale > 0 && keys_.count > 1 && Keys::kept(head_, b.token[r]) &&
                        bound - half_norm_[rank] <= kSafeSpread && bound <= kSafeHeight;
      b.shift[r] = safe ? half_norm_[rank] + bound : NAN;
      bounded = bounded && safe;
    }
    const float* queries = query_panel(b);
    // Rows whose bound is too loose take the maximum of their scores; the others keep their bits.
    if (!bounded) Base::shift_by_maxima(b, queries);
    alignas(64) float sums[kTile * kLanes] = {}, exact_sums[kTile * kLanes] = {};
    alignas(64) float out[kTile * 256];
    memset(out, 0, sizeof(float) * b.count * width_);
    if (p_.threshold) {
      // Probabilities must be known before they are compared: one pass for the sums alone.
      for (int j = 0; j * kTile < b.most; ++j) row_tile(b, queries, j, sums, nullptr);
      for (int r = 0; r < b.count; ++r) b.shift[r] += log2f(sum(load(sums + r * kLanes)));
    }
    for (int j = 0; j * kTile < b.most; ++j) {
      row_tile(b, queries, j, p_.threshold ? nullptr : sums, exact_sums);
      if constexpr (T::kPair == 1) {
        if (p_.dropout) dropout_factors(p_, head_, b.token, b.count, keys_.token + j * kTile, dropout_);
        if (p_.dropout || p_.threshold) {
          transform_weights(p_, p_.dropout ? dropout_ : nullptr, b.count, tile_.by_row);
        }
      }
      accumulate<T, ByRow>(out, width_, b.count, b.columns(j), tile_, values_ + rows_at(j), nullptr, nullptr, nullptr);
    }
    for (int r = 0; r < b.count; ++r) {
      const float total = b.limit[r] == 0 ? 0.0f : p_.threshold ? 1.0f : sum(load(sums + r * kLanes));
      finish(b.token[r], out + r * width_, total, T::kPair == 1 ? total : sum(load(exact_sums + r * kLanes)),
             b.shift[r]);
    }
  }

  // The panel of a block of queries: the keys' own where every token is a key.
  const float* query_panel(const Block& b) {
    if (keys_.count == head_.seqlen) return key_panels_ + panel_at(b.token[0] / kTile);
    const int64_t width = staging_width(p_.head_dim);
    stage(head_.w, p_.dtype, p_.head_dim, b.token, b.count, nullptr, width, staging_);
    pack_panel<T>(staging_, width, p_.head_dim, b.count, query_panel_);
    return query_panel_;
  }

  void row_tile(const Block& b, const float* queries, int j, float* sums, float* exact_sums) {
    int32_t limit[kTile];
    Scores s = Base::row_scores(b, queries, j, limit);
    s.sums.row = sums;
    if (T::kPair == 2) s.exact_sums.row = exact_sums;
    compute_weights<T>(s, tile_);
  }

  // Totals of rounded and of exact weights, 0 for a row without keys.
  void finish(int64_t token, float* out, float total, float exact, float shift) {
    const float inverse = total > 0.0f ? 1.0f / total : total;  // NaN stays
    for (int d = 0; d < width_; ++d) out[d] *= inverse;
    write_row(element(head_.out, token, p_.dtype), p_.dtype, head_.out.dim_stride, p_.head_dim, out);
    // In double: the backward takes 1 / l from lse, and an error of lse is a relative error of 1 / l.
    head_.lse[token] =
        total == 0.0f ? -INFINITY : static_cast<float>((log2(static_cast<double>(exact)) + shift) * kLn2);
  }

  float *values_, *out_, *running_, *query_panel_, *dropout_;
  Sums sums_ = {}, exact_sums_ = {};
  Tile<T> tile_;
};

template <class T>
void mssa_forward(const MssaProblem& p, const MssaHead& head, int part, int parts, Arena& arena) {
  Forward<T>(p, head, part, parts).run(arena);
}

}  // namespace
