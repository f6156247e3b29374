// Backward of one head: one accumulator for the gradient of the three roles of w.
//
// Pair form: with ghat_i = dout_i / l_i and dhat_i = (delta_i - dlse_i) / l_i, the tile
//   A_ij = scale E_ij (gamma_j (ghat_i . w_j - dhat_i) + gamma_i (ghat_j . w_i - dhat_j))
// is symmetric, and both bracketed products are one of inner size 2 head_dim. Rows and columns then take
//   dw_j += gamma_j sum_i E_ij ghat_i + sum_i A_ij w_i:  seven products per pair of tiles.
// Row form: P_ij = 2^(S_ij - lse_i), A_ij = scale P_ij (R_ij dout_i . w_j - delta_i + dlse_i),
//   dw_j += sum_i P_ij R_ij dout_i + A_ij w_i,  dw_i += sum_j A_ij w_j:  five products per tile.
// delta_i = dout_i . out_i is as exact as out. Where that is not enough, one product more gives
// delta_i = sum_j P_ij R_ij dout_i . w_j.
#pragma once

#include "gradients.h"
#include "shares.h"

namespace {

// Largest |lse| whose rounding is small beside the dtype's: the rounding of lse is the relative error of 1 / l.
CRATE_INLINE float trusted_lse(Dtype dtype) {
  return dtype == Dtype::f32 ? 16.0f : dtype == Dtype::f16 ? 1024.0f : 8192.0f;
}

// Largest |w|^2 scale / 2, in bits, with which 1 / l may come from lse and delta from out. A weight that is all of its
// row is exactly 1, its out exactly the token and its dP - delta exactly 0. A rounding error left there is multiplied
// by |w|^2 scale. In fp32 no weight is all of its row below 8.7 nats. 16-bit tokens survive the rounding of out, but
// not with dropout, where out is a multiple of the token. In fp16 the rounding of an out that is nearly one token
// shows.
CRATE_INLINE float trusted_height(Dtype dtype, bool dropout) {
  return dropout ? 4.0f : dtype == Dtype::f32 ? 6.0f : dtype == Dtype::f16 ? 12.0f : INFINITY;
}

// Up to so many keys, one weight is often all of its row, and eager's gradient exact. A rounded lse is not enough then.
constexpr int kFewKeys = 16;

template <class T>
class Backward : Head<T> {
  using Base = Head<T>;
  using Base::key_panels_, Base::query_panel_, Base::half_norm_, Base::mass_, Base::staging_, Base::dropout_;
  using Base::p_, Base::head_, Base::keys_, Base::width_, Base::words_, Base::factor_, Base::part_, Base::parts_;
  using Base::panel_at, Base::rows_at;

 public:
  using Base::Base;

  void run(Arena& arena, float* partial) {
    const int64_t size = crate_kernels::mssa_partial_size(head_.nkeys, p_.head_dim);
    float* share = partial == nullptr ? nullptr : partial + part_ * size;
    cut_arena(arena, [&](Scratch& s) {
      cut(s);
      if (partial == nullptr) share = s.floats(size);
    });
    memset(share, 0, size * sizeof(float));
    shares_ = shares(p_, head_.nkeys, share);
    find_keys();
    const Extent extent(half_norm_, keys_.count);
    if (keys_.count > 0) tallest_ = fmaxf(fabsf(extent.least), fabsf(extent.most));
    const bool paired = Base::pairs_allowed(extent) && trusted(keys_.token, keys_.count, tallest_);
    if (paired) pairs(extent.most);
    if (!paired || !Base::queries_are_keys()) rows(paired);
    if (partial == nullptr) mssa_combine(p_, head_, 1, share, 0, head_.nkeys);
  }

  // Adds what the queries give to the shares that are wanted. delta is given.
  void run_rows(Arena& arena, const MssaShares& wanted) {
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    shares_ = wanted;
    find_keys();
    rows(false);
  }

 private:
  void find_keys() {
    keys_.find(head_);
    Base::pack_keys(keys_rows_);
  }

  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile), panel = panel_size<T>(p_.head_dim);
    Base::cut(s);
    mass_panels_ = s.floats(padded / kTile * panel);
    dout_panels_ = s.floats(padded / kTile * panel);
    keys_rows_ = s.floats(padded / T::kPair * width_);
    dout_rows_ = s.floats(padded / T::kPair * width_);
    out_panel_ = s.floats(panel);
    query_rows_ = s.floats(kTile / T::kPair * width_);
    delta_ = s.floats(padded);
    dlse_ = s.floats(padded);
    other_ = s.floats(kTile * staging_width(p_.head_dim));
    exact_ = s.floats(T::kPair == 1 ? 0 : kTile * kTile);
  }

  float* key_share(int block) const { return shares_.as_key + static_cast<int64_t>(block) * kTile * width_; }

  // Packs dout of up to kTile tokens as a panel, and leaves it in staging_. Computes delta = dout . out and dlse. If
  // factor is given, all three are multiplied by factor[n].
  void pack_dout(const int32_t* token, int count, const float* factor, float* panel, float* delta, float* dlse) {
    const int64_t width = staging_width(p_.head_dim);
    if (head_.dout.data == nullptr) {
      memset(staging_, 0, round_up(count, kLanes) * width * sizeof(float));
    } else {
      stage(head_.dout, p_.dtype, p_.head_dim, token, count, factor, width, staging_);
    }
    pack_panel<T>(staging_, width, p_.head_dim, count, panel);
    // Thresholded weights are constants: only lse has a gradient with respect to the scores.
    if (head_.dout.data == nullptr || p_.threshold) {
      for (int n = 0; n < kTile; ++n) delta[n] = 0.0f;
    } else if (head_.delta != nullptr) {
      for (int n = 0; n < kTile; ++n) delta[n] = n < count ? head_.delta[token[n]] : 0.0f;
    } else {
      stage(head_.out, p_.dtype, p_.head_dim, token, count, nullptr, width, other_);
      pack_panel<T>(other_, width, p_.head_dim, count, out_panel_);
      dot_columns<T>(panel, out_panel_, words_, count, delta);
    }
    for (int n = 0; head_.dlse != nullptr && n < kTile; ++n) {
      dlse[n] = n < count ? head_.dlse[token[n]] : 0.0f;
      if (factor != nullptr) dlse[n] *= factor[n];
    }
  }

  // True if lse and out of these tokens are exact enough; `tallest` is the largest |h| in their scores.
  bool trusted(const int32_t* token, int count, float tallest) const {
    if (tallest > trusted_height(p_.dtype, p_.dropout)) return false;
    if (p_.dtype == Dtype::f32 && keys_.count <= kFewKeys) return false;
    const float most = trusted_lse(p_.dtype);
    for (int n = 0; n < count; ++n) {
      if (!(fabsf(head_.lse[token[n]]) <= most) && head_.lse[token[n]] != -INFINITY) return false;
    }
    return true;
  }

  // Sums of exact weights, where they are summed anew.
  Sums& wanted(Scores& s) const { return T::kPair == 1 ? s.sums : s.exact_sums; }

  void pairs(float largest) {
    const int64_t width = staging_width(p_.head_dim);
    Base::pair_masses(largest);
    for (int b = 0; b < keys_.blocks; ++b) {
      const int count = in_block(keys_.count, b), first = b * kTile;
      alignas(64) float inverse[kTile] = {};
      for (int n = 0; n < kTile; ++n) {
        const int k = first + n;
        if (n >= count) continue;
        inverse[n] = exp2f(static_cast<float>(half_norm_[k] + largest - head_.lse[keys_.token[k]] * kLog2e));
      }
      pack_dout(keys_.token + first, count, inverse, dout_panels_ + panel_at(b), delta_ + first, dlse_ + first);
      pack_rows<T>(staging_, width, width_, count, dout_rows_ + rows_at(b));
      Base::stage_keys(b, count, mass_ + first);
      pack_panel<T>(staging_, width, p_.head_dim, count, mass_panels_ + panel_at(b));
    }
    int index = 0;
    Base::for_each_pair([&](int i, int j) {
      if (index++ % parts_ == part_) pair(i, j);
    });
  }

  float* exact() { return T::kPair == 1 ? weights_.by_row : exact_; }

  GradientSide side(int block) const {
    const int first = block * kTile;
    return {dout_panels_ + panel_at(block), mass_panels_ + panel_at(block), delta_ + first,
            head_.dlse == nullptr ? nullptr : dlse_ + first, mass_ + first};
  }

  void pair(int i, int j) {
    Scores s = Base::pair_scores(i, j);
    s.exact = T::kPair == 1 ? nullptr : exact_;
    compute_weights<T>(s, weights_);
    alignas(64) float scales[kTile];
    for (float& scale : scales) scale = static_cast<float>(p_.scale);
    ScoreGradients g = {side(i), side(j)};
    g.words = words_;
    g.rows = s.rows;
    g.columns = s.columns;
    g.row_scale = scales;
    g.weights = exact();
    g.symmetric = i == j;
    compute_gradients<T>(g, gradients_);
    accumulate<T, Order::columns>(key_share(j), width_, s.columns, s.rows, weights_, dout_rows_ + rows_at(i),
                                  mass_ + j * kTile, &gradients_, keys_rows_ + rows_at(i));
    if (i != j) {
      accumulate<T, Order::rows>(key_share(i), width_, s.rows, s.columns, weights_, dout_rows_ + rows_at(j),
                                 mass_ + i * kTile, &gradients_, keys_rows_ + rows_at(j));
    }
  }

  void rows(bool padded_only) {
    Base::unit_masses();
    Base::for_each_query_block(padded_only, [this](Block& b) { row_block(b); });
  }

  // Computes from lse the shifts of a block, and the factors that make its weights probabilities. True if the weights
  // and `delta` are as exact as the dtype.
  bool shift_rows(Block& b, float tallest, float* residual) const {
    for (int r = 0; r < kTile; ++r) {
      const bool real = b.has_keys(r);
      const double lse = head_.lse[b.token[r]] * kLog2e;
      b.shift[r] = real ? static_cast<float>(lse) : kNoKeys;
      // The factor is the rounding error of the shift. With a threshold the weights themselves are compared.
      residual[r] = real && !p_.threshold ? exp2f(static_cast<float>(b.shift[r] - lse)) : 1.0f;
    }
    return p_.threshold || head_.delta != nullptr || trusted(b.token, b.count, tallest);
  }

  // Computes shifts, factors and delta from the scores: delta sums the same weights that it is subtracted from.
  void measure_rows(Block& b, const float* queries, float* residual, float* delta) {
    for (int r = 0; r < kTile; ++r) b.shift[r] = NAN;
    Base::shift_by_maxima(b, queries);
    alignas(64) float sums[kTile * kLanes] = {}, deltas[kTile * kLanes] = {};
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      Scores s = Base::row_scores(b, queries, j);
      s.exact = T::kPair == 1 ? nullptr : exact_;
      wanted(s).row = sums;
      compute_weights<T>(s, weights_);
      add_deltas<T>(score_gradients(b, j), deltas);
    }
    for (int r = 0; r < kTile; ++r) {
      const bool real = b.has_keys(r);
      residual[r] = real ? 1.0f / sum(load(sums + r * kLanes)) : 1.0f;
      delta[r] = real ? residual[r] * sum(load(deltas + r * kLanes)) : 0.0f;
    }
  }

  // Divides factor[r] by the sum of the weights of row r, which the rounding of lse keeps from being 1.
  void divide_by_sums(Block& b, const float* queries, float* factor) {
    alignas(64) float sums[kTile * kLanes] = {};
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      Scores s = Base::row_scores(b, queries, j);
      s.exact = T::kPair == 1 ? nullptr : exact_;
      wanted(s).row = sums;
      compute_weights<T>(s, weights_);
    }
    for (int r = 0; r < kTile; ++r) factor[r] /= b.has_keys(r) ? sum(load(sums + r * kLanes)) : 1.0f;
  }

  void row_block(Block& b) {
    const int64_t width = staging_width(p_.head_dim);
    const float* const queries = Base::query_panel(b);
    const float* query_rows = keys_rows_ + rows_at(b.token[0] / kTile);
    float tallest = tallest_;
    if (!Base::queries_are_keys()) {  // packed keys do not have these tokens side by side
      query_rows = query_rows_;
      pack_rows<T>(staging_, width, width_, b.count, query_rows_);
      for (int n = 0; n < b.count; ++n) {
        tallest = fmaxf(tallest, fabsf(half_norm(staging_ + n * width, width, factor_)));
      }
    }
    alignas(64) float residual[kTile], delta[kTile], dlse[kTile];
    // dP - delta cancels: the residual may scale the difference, but not round its terms.
    pack_dout(b.token, b.count, nullptr, dout_panels_, delta, dlse);
    if (!shift_rows(b, tallest, residual)) measure_rows(b, queries, residual, delta);
    Base::scale_staged(residual, b.count);
    pack_rows<T>(staging_, width, width_, b.count, dout_rows_);
    for (int r = 0; r < kTile; ++r) residual[r] *= static_cast<float>(p_.scale);

    // Thresholded weights are constants: only lse depends on the scores.
    const bool scored = !p_.threshold || head_.dlse != nullptr;
    if (p_.threshold && scored && head_.delta == nullptr && !trusted(b.token, b.count, tallest)) {
      divide_by_sums(b, queries, residual);
    }
    alignas(64) float as_query[kTile * 256];
    memset(as_query, 0, sizeof(float) * b.count * width_);
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      Scores s = Base::row_scores(b, queries, j);
      s.exact = T::kPair == 1 ? nullptr : exact_;
      compute_weights<T>(s, weights_);
      ScoreGradients g = score_gradients(b, j);
      g.row_scale = residual;
      g.row.delta = delta;
      g.row.dlse = head_.dlse == nullptr ? nullptr : dlse;
      if (scored) compute_gradients<T>(g, gradients_);
      if (T::kPair == 1 && (p_.dropout || p_.threshold)) transform_weights(p_, g.dropout, b.count, weights_.by_row);
      if (shares_.as_key != nullptr) {
        accumulate<T, Order::columns>(key_share(j), width_, s.columns, b.count, weights_, dout_rows_, nullptr,
                                      scored ? &gradients_ : nullptr, query_rows);
      }
      if (!scored || shares_.as_query == nullptr) continue;
      accumulate<T, Order::rows>(as_query, width_, b.count, s.columns, gradients_, keys_rows_ + rows_at(j), nullptr,
                                 nullptr, nullptr);
    }
    for (int r = 0; shares_.as_query != nullptr && r < b.count; ++r) {
      memcpy(shares_.as_query + static_cast<int64_t>(b.token[r]) * width_, as_query + r * width_,
             width_ * sizeof(float));
    }
  }

  // The terms of tile j's gradients that do not depend on the rows' sums; `weights_` holds the tile's weights.
  ScoreGradients score_gradients(const Block& b, int j) {
    if (T::kPair == 1 && p_.dropout) dropout_factors(p_, head_, b.token, b.count, keys_.token + j * kTile, dropout_);
    ScoreGradients g = {};
    g.row.dout = dout_panels_;
    g.column.w = key_panels_ + panel_at(j);
    g.column.u = mass_ + j * kTile;
    g.words = p_.threshold ? 0 : words_;
    g.rows = b.count;
    g.columns = b.columns(j);
    g.weights = exact();
    g.dropout = p_.dropout ? dropout_ : nullptr;
    return g;
  }

  MssaShares shares_;
  float *mass_panels_, *dout_panels_, *keys_rows_, *dout_rows_, *out_panel_, *query_rows_, *delta_, *dlse_, *other_,
      *exact_;
  float tallest_ = 0.0f;  // the largest |half_norm|
  Tile<T> weights_, gradients_;
};

template <class T>
void mssa_backward(const MssaProblem& p, const MssaHead& head, int part, int parts, Arena& arena, float* partial) {
  [[maybe_unused]] const typename T::Registers registers;
  Backward<T>(p, head, part, parts).run(arena, partial);
}

}  // namespace
