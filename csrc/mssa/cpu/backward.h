// Backward of one head: one accumulator for the gradient of the three roles of w.
//
// Pair form: with ghat_i = dout_i / l_i and dhat_i = (delta_i - dlse_i) / l_i, the tile
//   A_ij = scale E_ij (gamma_j (ghat_i . w_j - dhat_i) + gamma_i (ghat_j . w_i - dhat_j))
// is symmetric, and both bracketed products are one of inner size 2 head_dim. Rows and columns then take
//   dw_j += gamma_j sum_i E_ij ghat_i + sum_i A_ij w_i:  seven products per pair of tiles.
// Where norms spread too far for this, or scale is negative, halves of lse take the place of half norms in 16 bits.
// Row form: P_ij = 2^(S_ij - lse_i), A_ij = scale P_ij (R_ij dout_i . w_j - delta_i + dlse_i),
//   dw_j += sum_i P_ij R_ij dout_i + A_ij w_i,  dw_i += sum_j A_ij w_j:  five products per tile.
// 1 / l and delta: row_stats.h.
#pragma once

#include "half_lse.h"
#include "row_stats.h"
#include "shares.h"
#include "short_backward.h"

namespace {

template <class T>
class Backward {
 public:
  Backward(const MssaProblem& p, const MssaHead& head, int part, int parts)
      : p_(p), head_(head), tiles_(p, head, part, parts), stats_(tiles_, weights_) {}

  void run(Arena& arena, float* partial) {
    const int64_t size = crate_kernels::mssa_partial_size(head_.nkeys, p_.head_dim);
    float* share = partial == nullptr ? nullptr : partial + tiles_.part * size;
    cut_arena(arena, [&](Scratch& s) {
      cut(s);
      if (partial == nullptr) share = s.floats(size);
    });
    memset(share, 0, size * sizeof(float));
    shares_ = shares(p_, head_.nkeys, share);
    tiles_.fetch_ahead(head_.dw, {&MssaHead::w, &MssaHead::out, &MssaHead::dout});
    find_keys();
    const HalfNormRange extent(tiles_.half_norms, tiles_.keys.count);
    if (tiles_.keys.count > 0) max_half_norm_ = fmaxf(fabsf(extent.minimum), fabsf(extent.maximum));
    if (p_.dtype != Dtype::f32 && !p_.dropout && !p_.threshold) stats_.find_rounding();
    const bool paired = tiles_.has_all_pairs() && pairs_serve() && (tiles_.norms_serve(extent) || halve_lse(tiles_));
    if (paired) pairs(HalfNormRange(tiles_.half_norms, tiles_.keys.count).maximum);
    if (!paired || !tiles_.queries_are_keys()) rows(paired);
    if (partial == nullptr) mssa_combine(p_, head_, 1, share, 0, head_.nkeys);
  }

  // Adds what the queries give to the shares that are wanted. delta is passed.
  void run_rows(Arena& arena, const MssaShares& wanted) {
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    shares_ = wanted;
    find_keys();
    rows(false);
  }

 private:
  void find_keys() {
    tiles_.keys.find(head_);
    tiles_.pack_keys(keys_rows_);
  }

  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile), panel = panel_size<T>(p_.head_dim);
    tiles_.cut(s);
    stats_.cut(s);
    dout_panels_ = s.floats(padded / kTile * panel);
    mass_panels_ = s.floats(padded / kTile * panel);
    keys_rows_ = s.floats(padded / T::kPair * tiles_.row_width);
    dout_rows_ = s.floats(padded / T::kPair * tiles_.row_width);
    query_rows_ = s.floats(kTile / T::kPair * tiles_.row_width);
    collected_ = s.ints(kTile);
    inverse_ = s.floats(padded);
    terms_ = {s.floats(padded), s.floats(padded), s.floats(padded)};
    sums_ = {s.floats(padded * kLanes), s.floats(padded)};
  }

  float* key_share(int block) const { return shares_.as_key + static_cast<int64_t>(block) * kTile * tiles_.row_width; }

  // The terms of up to kTile tokens that are subtracted from products with dout, and added.
  struct RowTerms {
    float *delta, *rest, *dlse;
  };

  // Packs dout of up to kTile tokens as a panel, and leaves it in the staging. Computes the sum delta + rest = dout .
  // out, and dlse. If factor is not null, all are multiplied by factor[n].
  void pack_dout(const int32_t* token, int count, const float* factor, float* panel, const RowTerms& terms) {
    const int64_t width = staging_width(p_.head_dim);
    if (head_.dout.data == nullptr) {
      memset(tiles_.staging, 0, round_up(count, kLanes) * width * sizeof(float));
    } else {
      stage(head_.dout, p_.dtype, p_.head_dim, token, count, factor, width, tiles_.staging);
    }
    pack_panel<T>(tiles_.staging, width, p_.head_dim, count, panel);
    // Thresholded weights are constants: only lse has a gradient with respect to the scores.
    const bool computed = head_.dout.data != nullptr && !p_.threshold && head_.delta == nullptr;
    if (computed) stats_.deltas_from_out(token, count, panel, terms.delta, terms.rest);
    for (int n = 0; n < kTile; ++n) {
      const bool passed = n < count && head_.delta != nullptr;
      if (!computed) terms.delta[n] = passed ? head_.delta[token[n]] : 0.0f;
      if (!computed) terms.rest[n] = 0.0f;
      terms.dlse[n] = n < count && head_.dlse != nullptr ? head_.dlse[token[n]] : 0.0f;
      if (factor != nullptr && n < count) terms.dlse[n] *= factor[n];  // padding has no factor
    }
  }

  // Classifies the keys. True if the pair form serves.
  bool pairs_serve() {
    int untrusted = 0;
    for (int k = 0; k < tiles_.keys.count; ++k) {
      const int32_t token = tiles_.keys.token[k];
      stats_.row_source[token] = stats_.classify_row(token, tiles_.keys.count, max_half_norm_);
      untrusted += stats_.row_source[token] != StatsSource::forward &&
                   (stats_.row_source[token] != StatsSource::sum_only || tiles_.parts > 1);
    }
    // Each part would recompute the rows of all parts. For heads with large norms the row form is more exact: it
    // divides the weights first.
    return untrusted == 0 || (p_.dtype == Dtype::f32 && tiles_.parts == 1 && max_half_norm_ <= kTallestPairs);
  }

  // Collects the rows without delta, and recomputes them by blocks.
  template <class Recompute>
  void collect(int32_t token, const Recompute& recompute) {
    if (!needs_recompute(stats_.row_source[token])) return;
    collected_[collected_count_++] = token;
    if (collected_count_ == kTile) recompute_collected(recompute);
  }
  template <class Recompute>
  void recompute_collected(const Recompute& recompute) {
    if (collected_count_ > 0) recompute(collected_, collected_count_);
    collected_count_ = 0;
  }

  // 2^(h + largest - shift) / sum of a key, the factor of its dout in the pair form.
  float inverse_of(int32_t token, float largest, double shift, double sum) const {
    return static_cast<float>(::exp2(tiles_.half_norms[tiles_.keys.rank[token]] + largest - shift) / sum);
  }

  void find_inverses(float largest) {
    bool sums = false;
    for (int k = 0; k < tiles_.keys.count; ++k) {
      sums = sums || stats_.row_source[tiles_.keys.token[k]] == StatsSource::delta_only;
    }
    if (sums) sum_pairs(largest);
    tiles_.unit_masses();
    const auto inverse = [&](int32_t t) { return inverse_of(t, largest, stats_.row_shift[t], stats_.row_sum[t]); };
    const auto recompute = [&](const int32_t* token, int count) { stats_.recompute(token, count, inverse); };
    for (int k = 0; k < tiles_.keys.count; ++k) collect(tiles_.keys.token[k], recompute);
    recompute_collected(recompute);
    // All keys in vectors; those whose lse does not serve are replaced below.
    double exponents[kTile];
    for (int first = 0; first < tiles_.keys.count; first += kTile) {
      const int count = in_block(tiles_.keys.count, first / kTile);
      for (int n = 0; n < count; ++n) {
        exponents[n] = tiles_.half_norms[first + n] + largest - head_.lse[tiles_.keys.token[first + n]] * kLog2e;
      }
      for (int n = 0; n < count; ++n) inverse_[first + n] = exp2_of(exponents[n]);
    }
    for (int k = 0; k < tiles_.keys.count; ++k) {
      const int32_t t = tiles_.keys.token[k];
      if (needs_recompute(stats_.row_source[t])) inverse_[k] = inverse(t);
      if (stats_.row_source[t] == StatsSource::delta_only) inverse_[k] = 1.0f / total_of(sums_, k);
    }
  }

  void sum_pairs(float largest) {
    tiles_.pair_masses(largest);
    clear(sums_, tiles_.keys.blocks * kTile);
    tiles_.for_each_pair([this](int i, int j) {
      Scores s = tiles_.pair_scores(i, j);
      alignas(64) float column[kTile] = {};
      s.sums = sums_at(sums_, i, column);
      compute_weights<T>(s, weights_.operand);
      add_columns(sums_, j, column);
    });
  }

  void pairs(float largest) {
    const int64_t width = staging_width(p_.head_dim);
    find_inverses(largest);
    tiles_.pair_masses(largest);
    for (int b = 0; b < tiles_.keys.blocks; ++b) {
      const int count = in_block(tiles_.keys.count, b), first = b * kTile;
      const RowTerms terms = {terms_.delta + first, terms_.rest + first, terms_.dlse + first};
      pack_dout(tiles_.keys.token + first, count, inverse_ + first, dout_panels_ + tiles_.panel_at(b), terms);
      for (int n = 0; n < count; ++n) use_recomputed(tiles_.keys.token[first + n], n, terms);
      pack_rows<T>(tiles_.staging, width, tiles_.row_width, count, dout_rows_ + tiles_.rows_at(b));
      tiles_.stage_keys(b, count, tiles_.masses + first);
      pack_panel<T>(tiles_.staging, width, p_.head_dim, count, mass_panels_ + tiles_.panel_at(b));
    }
    int index = 0;
    tiles_.for_each_pair([&](int i, int j) {
      if (index++ % tiles_.parts == tiles_.part) pair(i, j);
    });
  }

  void use_recomputed(int32_t token, int n, const RowTerms& terms) const {
    if (!needs_recompute(stats_.row_source[token])) return;
    terms.delta[n] = stats_.row_delta[token];
    terms.rest[n] = 0.0f;
  }

  // 16-bit tokens leave no rest.
  const float* rested(const float* rest) const { return p_.dtype == Dtype::f32 ? rest : nullptr; }

  GradientSide side(int block) const {
    const int first = block * kTile;
    return {dout_panels_ + tiles_.panel_at(block),
            mass_panels_ + tiles_.panel_at(block),
            terms_.delta + first,
            head_.dlse == nullptr ? nullptr : terms_.dlse + first,
            tiles_.masses + first,
            rested(terms_.rest + first)};
  }

  void pair(int i, int j) {
    const Scores s = tiles_.pair_scores(i, j);
    weights_.compute(s);
    alignas(64) float scales[kTile];
    for (float& scale : scales) scale = static_cast<float>(p_.scale);
    ScoreGradients g = {side(i), side(j)};
    g.words = tiles_.words;
    g.rows = s.rows;
    g.columns = s.columns;
    g.row_scale = scales;
    g.weights = weights_.exact();
    g.symmetric = i == j;
    compute_gradients<T>(g, dscore_tile_);
    accumulate<T, Order::columns>(key_share(j), tiles_.row_width, s.columns, s.rows, weights_.operand,
                                  dout_rows_ + tiles_.rows_at(i), tiles_.masses + j * kTile, &dscore_tile_,
                                  keys_rows_ + tiles_.rows_at(i), tiles_.ahead);
    if (i != j) {
      accumulate<T, Order::rows>(key_share(i), tiles_.row_width, s.rows, s.columns, weights_.operand,
                                 dout_rows_ + tiles_.rows_at(j), tiles_.masses + i * kTile, &dscore_tile_,
                                 keys_rows_ + tiles_.rows_at(j), tiles_.ahead);
    }
  }

  void rows(bool padded_only) {
    tiles_.unit_masses();
    if (p_.threshold) {
      tiles_.find_bounds_of_keys();
    } else if (head_.delta == nullptr) {
      const auto recompute = [this](const int32_t* token, int count) { stats_.recompute(token, count); };
      tiles_.for_each_query_block(padded_only, [&](QueryBlock& b) {
        for (int r = 0; r < b.count; ++r) {
          stats_.row_source[b.token[r]] = stats_.classify_row(b.token[r], b.stop[r] - b.first[r], max_half_norm_);
          collect(b.token[r], recompute);
        }
      });
      recompute_collected(recompute);
    }
    tiles_.for_each_query_block(padded_only, [this](QueryBlock& b) { row_block(b); });
  }

  // Finds shifts of a block, the factors that make its weights probabilities, and the deltas of recomputed rows. True
  // if the weights must be summed to make probabilities of them.
  bool shift_rows(QueryBlock& b, float* residual, const RowTerms& terms) const {
    bool sums = false;
    for (int r = 0; r < kTile; ++r) {
      const int32_t t = b.token[r];
      const bool real = b.has_keys(r);
      const StatsSource source = real && head_.delta == nullptr ? stats_.row_source[t] : StatsSource::forward;
      if (needs_recompute(source)) {
        b.shift[r] = stats_.row_shift[t];
        residual[r] = 1.0f / stats_.row_sum[t];
        use_recomputed(t, r, terms);
        continue;
      }
      const double lse = head_.lse[t] * kLog2e;
      b.shift[r] = real ? static_cast<float>(lse) : kNoKeys;
      // The factor is the rounding error of the shift, unless sums of the weights have it.
      const bool exact = real && source == StatsSource::forward;
      residual[r] = exact ? exp2f(static_cast<float>(b.shift[r] - lse)) : 1.0f;
      sums = sums || source != StatsSource::forward;
    }
    return sums;
  }

  // Where the lse of a range's row is large, and no more than its rounding from the largest score here, takes that
  // score in its place: a weight that is all of its row is then exactly 1.
  void shift_by_one_weight(QueryBlock& b, const float* queries, float* residual) const {
    constexpr double kRounding = 0x1.01p-24;  // of lse, relative
    float shift[kTile];
    bool large[kTile], any = false;
    for (int r = 0; r < b.count; ++r) {
      shift[r] = b.shift[r];
      large[r] = b.has_keys(r) && fabsf(head_.lse[b.token[r]]) > trusted_lse(p_.dtype);
      if (large[r]) b.shift[r] = NAN;
      any = any || large[r];
    }
    if (!any) return;
    tiles_.shift_by_maxima(b, queries);
    for (int r = 0; r < b.count; ++r) {
      if (!large[r]) continue;
      const double lse = head_.lse[b.token[r]] * kLog2e;
      const bool all = fabs(b.shift[r] - lse) <= kRounding * fabs(lse);
      if (all) residual[r] = 1.0f;
      if (!all) b.shift[r] = shift[r];
    }
  }

  // Divides the factors of rows that are not recomputed by the sums of their weights, which the rounding of lse keeps
  // from being 1.
  void divide_by_sums(const QueryBlock& b, const float* queries, float* factor) {
    alignas(64) float sums[kTile];
    stats_.weigh(b, queries, sums, nullptr);
    for (int r = 0; r < b.count; ++r) {
      if (!needs_recompute(stats_.row_source[b.token[r]])) factor[r] /= sums[r];
    }
  }

  // Finds the shifts of a block as the forward does, what its weights are compared with, and the factors that make them
  // probabilities.
  void find_selection(QueryBlock& b, const float* queries, float* minimum, float* factor) {
    tiles_.find_shifts(b, queries);
    alignas(64) float sums[kTile];
    stats_.weigh(b, queries, sums, nullptr);
    for (int r = 0; r < kTile; ++r) {
      minimum[r] = p_.level * sums[r];
      factor[r] = 1.0f / sums[r];
    }
  }

  void row_block(QueryBlock& b) {
    const int64_t width = staging_width(p_.head_dim);
    const float* const queries = tiles_.pack_queries(b);
    const float* query_rows = keys_rows_ + tiles_.rows_at(b.token[0] / kTile);
    if (!tiles_.queries_are_keys()) {  // packed keys do not have these tokens side by side
      query_rows = query_rows_;
      pack_rows<T>(tiles_.staging, width, tiles_.row_width, b.count, query_rows_);
    }
    alignas(64) float residual[kTile], minimum[kTile], delta[kTile], rest[kTile], dlse[kTile];
    const RowTerms terms = {delta, rest, dlse};
    // dP - delta cancels: the residual may scale the difference, but not round its terms.
    pack_dout(b.token, b.count, nullptr, dout_panels_, terms);
    if (p_.threshold) {
      find_selection(b, queries, minimum, residual);
    } else {
      if (shift_rows(b, residual, terms)) divide_by_sums(b, queries, residual);
      if (head_.delta != nullptr) shift_by_one_weight(b, queries, residual);
      tiles_.scale_staged(residual, b.count);
    }
    pack_rows<T>(tiles_.staging, width, tiles_.row_width, b.count, dout_rows_);
    for (int r = 0; r < kTile; ++r) residual[r] *= static_cast<float>(p_.scale);

    // Thresholded weights are constants: only lse depends on the scores.
    const bool scored = !p_.threshold || head_.dlse != nullptr;
    alignas(64) float as_query[kTile * 256];
    memset(as_query, 0, sizeof(float) * b.count * tiles_.row_width);
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      const Scores s = tiles_.row_scores(b, queries, j);
      weights_.compute(s);
      ScoreGradients g = stats_.score_gradients(b, j, dout_panels_);
      g.row_scale = residual;
      g.row.delta = delta;
      g.row.rest = rested(rest);
      g.row.dlse = head_.dlse == nullptr ? nullptr : dlse;
      if (scored) compute_gradients<T>(g, dscore_tile_);
      if (T::kPair == 1 && (p_.dropout || p_.threshold)) {
        transform_weights(p_, minimum, g.dropout, b.count, weights_.operand.by_row);
      }
      if (shares_.as_key != nullptr) {
        accumulate<T, Order::columns>(key_share(j), tiles_.row_width, s.columns, b.count, weights_.operand, dout_rows_,
                                      nullptr, scored ? &dscore_tile_ : nullptr, query_rows, tiles_.ahead);
      }
      if (!scored || shares_.as_query == nullptr) continue;
      accumulate<T, Order::rows>(as_query, tiles_.row_width, b.count, s.columns, dscore_tile_,
                                 keys_rows_ + tiles_.rows_at(j), nullptr, nullptr, nullptr, tiles_.ahead);
    }
    for (int r = 0; shares_.as_query != nullptr && r < b.count; ++r) {
      memcpy(shares_.as_query + static_cast<int64_t>(b.token[r]) * tiles_.row_width, as_query + r * tiles_.row_width,
             tiles_.row_width * sizeof(float));
    }
  }

  const MssaProblem& p_;
  const MssaHead& head_;
  HeadTiles<T> tiles_;
  TileWeights<T> weights_;
  RowStats<T> stats_;
  MssaShares shares_;
  float *dout_panels_, *mass_panels_, *keys_rows_, *dout_rows_, *query_rows_;
  float* inverse_;  // by key, as are the terms
  RowTerms terms_;
  TileSums sums_ = {};  // of the pairs' weights
  int32_t* collected_;  // tokens
  int collected_count_ = 0;
  float max_half_norm_ = 0.0f;  // the largest |half_norm|
  WeightTile<T> dscore_tile_;
};

template <class T>
void mssa_backward(const MssaProblem& p, const MssaHead& head, int part, int parts, Arena& arena, float* partial) {
  [[maybe_unused]] const typename T::Registers registers;
  if (ShortBackward<T>::serves(p, head, parts)) return ShortBackward<T>(p, head, part, parts).run(arena);
  Backward<T>(p, head, part, parts).run(arena, partial);
}

}  // namespace
