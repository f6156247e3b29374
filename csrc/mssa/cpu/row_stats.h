// 1 / l and delta of each row of a backward: from the forward's results, or summed anew where these are not exact
// enough.
//
// delta_i = dout_i . out_i is as exact as out. In fp32, where a row's own weight is half of it or more,
// delta_i - dout_i . w_i = dout_i . (out_i - w_i) is small, and exact in itself. Where another weight may be, and in 16
// bits where the rounding of out would show, sums over the row's weights give l and delta_i = sum_j P_ij R_ij dout_i .
// w_j.
#pragma once

#include "gradients.h"
#include "phi.h"

namespace {

// Largest |lse| whose rounding is small beside the dtype's: the rounding of lse is the relative error of 1 / l.
CRATE_INLINE float trusted_lse(Dtype dtype) {
  return dtype == Dtype::f32 ? 16.0f : dtype == Dtype::f16 ? 1024.0f : 8192.0f;
}

// Largest |w|^2 scale / 2, in bits, with which delta may come from out, whatever the row. A weight that is all of its
// row is exactly 1, its out exactly the token and its dP - delta exactly 0. A rounding error left there is multiplied
// by |w|^2 scale. In fp32 no weight is all of its row below 8.7 nats. With dropout, out is a multiple of the token.
CRATE_INLINE float trusted_height(bool dropout) {
  return dropout ? 4.0f : 6.0f;
}

// In 16 bits, dw is off by |scale| |out|_max sqrt(sum_d dout_d^2 out_d^2) units of 0.2 eps, the deviation of a
// rounding. So many of the largest |dout| of the head are within the dtype's own error. Random tokens and gradients
// have 0.75; layer-normed tokens whose gradients are all one have 3.
constexpr float kMaxRounding = 2.0f;
constexpr float kDeviation = 0.2f;

// Up to so many keys, one weight is often all of its row, and eager's gradient exact. A rounded lse is not enough then.
constexpr int kFewKeys = 16;

// Above that height a row of fp32 may take delta from out as well if one weight is not nearly all of it, or is its own,
// and a difference below an ulp is the rounding of out. Tall rows and short sequences are recomputed all the same:
// eager's gradient is often exact there, and they cost little.
constexpr float kMostlyOwn = -1.0f;  // smallest weight, in bits, of a row that is mostly its own token
constexpr float kMaxScore = 32.0f;   // largest |w|^2 scale, in bits
constexpr int kMinKeys = 128;
constexpr float kUlp = 0x1p-23f;
// Largest |w|^2 scale / 2, in bits, of a pair form with recomputed rows.
constexpr float kTallestPairs = 12.0f;

// What a row may take from the forward's results: l from lse and delta from out, one of them alone, or nothing. Rows
// without delta are recomputed.
enum class StatsSource : int32_t { forward, delta_only, sum_only, recompute };

constexpr bool needs_recompute(StatsSource source) {
  return source == StatsSource::sum_only || source == StatsSource::recompute;
}

// 1 / l and delta of the rows of one head. Computes tiles in `weights`, which the gradients use between its calls.
template <class T>
class RowStats {
 public:
  RowStats(HeadTiles<T>& tiles, TileWeights<T>& weights)
      : p_(tiles.p), head_(tiles.head), tiles_(tiles), weights_(weights) {}

  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile), panel = panel_size<T>(p_.head_dim);
    dout_panel_ = s.floats(panel);
    out_panel_ = s.floats(panel);
    out_ = s.floats(kTile * staging_width(p_.head_dim));
    tokens_ = s.floats(kTile * staging_width(p_.head_dim));
    row_source = reinterpret_cast<StatsSource*>(s.ints(padded));
    row_shift = s.floats(padded);
    row_sum = s.floats(padded);
    row_delta = s.floats(padded);
  }

  // Says what a token that sees `num_keys` keys may take; `max_half_norm` is the largest |h| of the keys.
  //
  // In fp32 it may take delta if no other token has half of its weight. The entropy of a row is lse - scale w . out,
  // and with a half on one key at most that of a half spread over all. Of an lse above kSafeHeight, which another token
  // may give to a row of low score, rounding would leave no entropy, nor weights that can be summed.
  StatsSource classify_row(int32_t token, int num_keys, float max_half_norm) const {
    const float lse = head_.lse[token], limit = trusted_height(p_.dropout);
    if (lse == -INFINITY) return StatsSource::forward;
    const bool is_f32 = p_.dtype == Dtype::f32, sum = fabsf(lse) <= trusted_lse(p_.dtype);
    if (!(fabsf(lse) < INFINITY) || (is_f32 ? tiles_.keys.count <= kFewKeys : !sum)) return StatsSource::recompute;
    if (!is_f32 && !p_.dropout) return row_source[token];
    const int64_t width = staging_width(p_.head_dim);
    read(head_.w, token, tokens_);
    const float score = tiles_.score_factor * row_dot(tokens_, tokens_, width);
    bool delta = fmaxf(max_half_norm, 0.5f * fabsf(score)) <= limit;
    const bool low = fabsf(score) <= kMaxScore && fabsf(bits(lse)) <= kSafeHeight && tiles_.keys.count >= kMinKeys;
    if (!delta && low && is_f32 && !p_.dropout) {
      read(head_.out, token, out_);
      const float entropy = bits(lse) - tiles_.score_factor * row_dot(tokens_, out_, width);
      delta = mostly_own(token, score) || entropy >= 1.0f + 0.5f * log2f(static_cast<float>(num_keys));
    }
    return !delta ? StatsSource::recompute : sum ? StatsSource::forward : StatsSource::delta_only;
  }

  // Says of 16-bit rows whether they may take delta from out, as far as its rounding goes. Sets row_source.
  void find_rounding() {
    for (int64_t t = 0; t < head_.seqlen; ++t) row_source[t] = StatsSource::forward;
    if (head_.dout.data == nullptr) return;
    Magnitudes max_of = {};
    for (int32_t first = 0; first < head_.seqlen; first += kLanes) {
      Vf squares[kLanes];
      for (int n = 0; n < kLanes; ++n) squares[n] = first + n < head_.seqlen ? squares_of(first + n, max_of) : Vf{};
      store(row_delta + first, sums(squares));
    }
    const float scale = static_cast<float>(fabs(p_.scale)), maximum = kMaxRounding * max(as_float(max_of.dout)),
                high = scale * max(as_float(max_of.out));
    int tallest = -1;
    for (int32_t t = 0; t < head_.seqlen; ++t) {
      if (!(high * high * row_delta[t] > maximum * maximum)) continue;
      Magnitudes own = {};
      squares_of(t, own);
      const float rounding = scale * max(as_float(own.out)) * sqrtf(row_delta[t]);
      if (!(rounding > maximum)) continue;
      for (int k = tallest < 0 ? 0 : tiles_.keys.count; k < tiles_.keys.count; ++k) {
        if (tallest < 0 || tiles_.half_norms[k] > tiles_.half_norms[tallest]) tallest = k;
      }
      if (tallest < 0 || !is_one_token(t, tiles_.keys.token[tallest], maximum / rounding))
        row_source[t] = StatsSource::sum_only;
    }
  }

  // delta + rest = dout . out for a panel of dout. Where a row is mostly its own token, delta is dout . w.
  void deltas_from_out(const int32_t* token, int count, const float* panel, float* delta, float* rest) {
    const int64_t width = staging_width(p_.head_dim);
    bool own[kTile] = {};
    stage(head_.out, p_.dtype, p_.head_dim, token, count, nullptr, width, out_);
    if (p_.dtype == Dtype::f32 && !p_.dropout) {
      stage(head_.w, p_.dtype, p_.head_dim, token, count, nullptr, width, tokens_);
      pack_panel<T>(tokens_, width, p_.head_dim, count, out_panel_);
      dot_columns<T>(panel, out_panel_, tiles_.words, count, delta);
      for (int n = 0; n < count; ++n) {
        float* const out = out_ + n * width;
        const float* const w = tokens_ + n * width;
        const float square = row_dot(w, w, width);
        own[n] = mostly_own(token[n], tiles_.score_factor * square);
        if (!own[n]) continue;
        for (int64_t d = 0; d < width; d += kLanes) store(out + d, load(out + d) - load(w + d));
        // Below an ulp the difference is the rounding of out.
        if (row_dot(out, out, width) <= kUlp * kUlp * square) memset(out, 0, width * sizeof(float));
      }
    }
    pack_panel<T>(out_, width, p_.head_dim, count, out_panel_);
    dot_columns<T>(panel, out_panel_, tiles_.words, count, rest);
    for (int n = 0; n < kTile; ++n) {
      if (n < count && own[n]) continue;
      delta[n] = n < count ? rest[n] : 0.0f;
      rest[n] = 0.0f;
    }
  }

  // Recomputes rows: row_shift, row_sum and row_delta.
  void recompute(const int32_t* token, int count) {
    QueryBlock b;
    start(b, token, count);
    alignas(64) float sums[kTile], deltas[kTile];
    stage_dout(b, nullptr);
    weigh(b, tiles_.query_panel, sums, deltas);
    save_row_stats(b, sums, deltas);
  }

  // The same for a dout that is multiplied by factor_of(token), which reads row_shift and row_sum.
  template <class Factor>
  void recompute(const int32_t* token, int count, const Factor& factor_of) {
    QueryBlock b;
    alignas(64) float sums[kTile], deltas[kTile] = {}, factor[kTile];
    for (float& sum : sums) sum = 1.0f;
    if (start(b, token, count)) weigh(b, tiles_.query_panel, sums, nullptr);
    save_row_stats(b, sums, deltas);
    for (int r = 0; r < count; ++r) factor[r] = factor_of(token[r]);
    stage_dout(b, factor);
    weigh(b, tiles_.query_panel, sums, deltas);
    for (int r = 0; r < count; ++r) row_delta[token[r]] = deltas[r] / sums[r];
  }

  // Sums the weights of the rows of a block, and their deltas for the panel of dout at dout_panel_; null: not wanted.
  void weigh(const QueryBlock& b, const float* queries, float* sums, float* deltas) {
    alignas(64) float sum_lanes[kTile * kLanes] = {}, delta_lanes[kTile * kLanes] = {};
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      Scores s = tiles_.row_scores(b, queries, j);
      wanted(s).row = sums == nullptr ? nullptr : sum_lanes;
      weights_.compute(s);
      if (deltas != nullptr) add_deltas<T>(score_gradients(b, j, dout_panel_), delta_lanes);
    }
    for (int r = 0; r < kTile; ++r) {
      const bool real = b.has_keys(r);
      if (sums != nullptr) sums[r] = real ? sum(load(sum_lanes + r * kLanes)) : 1.0f;
      if (deltas != nullptr) deltas[r] = real ? sum(load(delta_lanes + r * kLanes)) : 0.0f;
    }
  }

  // The terms of tile j's gradients that do not depend on the rows' sums; weights_ has the tile's weights.
  ScoreGradients score_gradients(const QueryBlock& b, int j, const float* dout_panel) const {
    if (T::kPair == 1 && p_.dropout)
      dropout_factors(p_, head_, b.token, b.count, tiles_.keys.token + j * kTile, tiles_.dropout);
    ScoreGradients g = {};
    g.row.dout = dout_panel;
    g.column.w = tiles_.key_panels + tiles_.panel_at(j);
    g.column.mass = tiles_.masses + j * kTile;
    g.words = p_.threshold ? 0 : tiles_.words;
    g.rows = b.count;
    g.columns = b.columns(j);
    g.weights = weights_.exact();
    g.dropout = p_.dropout ? tiles_.dropout : nullptr;
    return g;
  }

  // By token; the last three of rows that are recomputed.
  StatsSource* row_source;
  float *row_shift, *row_sum, *row_delta;  // row_sum: of the weights that are shifted so

 private:
  static float bits(float nats) { return nats * static_cast<float>(kLog2e); }

  // Sums of exact weights, where they are summed anew.
  static TileSums& wanted(Scores& s) { return T::kPair == 1 ? s.sums : s.exact_sums; }

  // True if a token's weight for itself is half of its row or more; `score` is its score with itself, in bits.
  bool mostly_own(int32_t token, float score) const {
    return head_.itself && KeyList::is_key(head_, token) && score - bits(head_.lse[token]) >= kMostlyOwn;
  }

  // The largest |out_d| and |dout_d|, by lanes: as integers, whose maximum is one instruction.
  struct Magnitudes {
    Vi out, dout;
  };

  // The squares of dout_d out_d of a row, by lanes. Sums in registers: this is read before every backward.
  CRATE_INLINE Vf squares_of(int32_t token, Magnitudes& maximum) const {
    Vf squares = {};
    Vi out = maximum.out, dout = maximum.dout;
    const auto add = [&](Vf o, Vf g) CRATE_LAMBDA {
      const Vf product = o * g;
      squares += product * product;
      const Vi high = (Vi)o & 0x7fffffff, upstream = (Vi)g & 0x7fffffff;
      out = high > out ? high : out;
      dout = upstream > dout ? upstream : dout;
    };
    const bool whole = p_.head_dim % kLanes == 0 && head_.out.dim_stride == 1 && head_.dout.dim_stride == 1;
    if (whole && p_.dtype == Dtype::bf16) {
      const auto* const o = static_cast<const uint16_t*>(head_.out.data) + token * head_.out.token_stride;
      const auto* const g = static_cast<const uint16_t*>(head_.dout.data) + token * head_.dout.token_stride;
      for (int d = 0; d < p_.head_dim; d += kLanes) add(load_bf16(o + d), load_bf16(g + d));
    } else {
      read(head_.out, token, out_);
      read(head_.dout, token, tokens_);
      for (int64_t d = 0; d < staging_width(p_.head_dim); d += kLanes) add(load(out_ + d), load(tokens_ + d));
    }
    maximum = {out, dout};
    return squares;
  }

  // True if one weight is so nearly all of a row that out is its token: the row's own, or that of the tallest key.
  // The other weights' share of delta may be `share` roundings.
  bool is_one_token(int32_t token, int32_t tallest, float share) const {
    const int64_t width = staging_width(p_.head_dim);
    const float lse = bits(head_.lse[token]), eps = p_.dtype == Dtype::bf16 ? 0x1p-7f : 0x1p-10f;
    const auto is_all = [&](float score) {
      const float above = lse > score ? lse - score : 0.0f;
      const float rest = above * static_cast<float>(kLn2) + kUlp * fabsf(head_.lse[token]);
      return 2.0f * rest <= kDeviation * eps * share;
    };
    read(head_.w, token, tokens_);
    if (KeyList::is_key(head_, token) && is_all(tiles_.score_factor * row_dot(tokens_, tokens_, width))) return true;
    const Span seen = keys_of(p_.mask, {token, token + 1}, static_cast<int>(head_.nkeys));
    if (!KeyList::is_key(head_, tallest) || tallest < seen.first || tallest >= seen.stop) return false;
    read(head_.keys, tallest, out_);
    return is_all(tiles_.score_factor * row_dot(tokens_, out_, width));
  }

  // Rows whose sum is passed have lse as their shift, the others the maximum of their scores.
  // True if there are such others.
  bool start(QueryBlock& b, const int32_t* token, int count) {
    b.count = count;
    memcpy(b.token, token, count * sizeof(int32_t));
    tiles_.find_bounds(b);
    bool maxima = false;
    for (int r = 0; r < kTile; ++r) {
      const bool has_sum = row_source[b.token[r]] == StatsSource::sum_only;
      b.shift[r] = has_sum ? bits(head_.lse[b.token[r]]) : NAN;
      maxima = maxima || !has_sum;
    }
    const int64_t width = staging_width(p_.head_dim);
    stage(head_.w, p_.dtype, p_.head_dim, b.token, count, nullptr, width, tiles_.staging);
    pack_panel<T>(tiles_.staging, width, p_.head_dim, count, tiles_.query_panel);
    if (maxima) tiles_.shift_by_maxima(b, tiles_.query_panel);
    return maxima;
  }

  void stage_dout(const QueryBlock& b, const float* factor) {
    const int64_t width = staging_width(p_.head_dim);
    if (head_.dout.data == nullptr) {
      memset(dout_panel_, 0, panel_size<T>(p_.head_dim) * sizeof(float));
      return;
    }
    stage(head_.dout, p_.dtype, p_.head_dim, b.token, b.count, factor, width, tiles_.staging);
    pack_panel<T>(tiles_.staging, width, p_.head_dim, b.count, dout_panel_);
  }

  // delta sums the very weights and products that it is subtracted from.
  void save_row_stats(const QueryBlock& b, const float* sums, const float* deltas) {
    for (int r = 0; r < b.count; ++r) {
      row_shift[b.token[r]] = b.shift[r];
      row_sum[b.token[r]] = sums[r];
      row_delta[b.token[r]] = deltas[r] / sums[r];
    }
  }

  void read(const MssaView& view, int32_t token, float* row) const {
    read_row(element(view, token, p_.dtype), p_.dtype, view.dim_stride, p_.head_dim, row);
    for (int64_t d = p_.head_dim; d < staging_width(p_.head_dim); ++d) row[d] = 0.0f;
  }

  const MssaProblem& p_;
  const MssaHead& head_;
  HeadTiles<T>& tiles_;
  TileWeights<T>& weights_;
  float *dout_panel_, *out_panel_;
  float *out_, *tokens_;  // staged rows
};

}  // namespace
