// Backward of some tokens of a sequence, the rows, from others, the columns: what these add to dw of the rows. lse,
// delta and dlse are passed, over all keys of the sequence.
//
// Rows and columns that all see each other share one exponential, unless an lse is so large that its rounding counts:
//   P_ij = 2^(S_ij - lse_i), P_ji = P_ij 2^(lse_i - lse_j)
//   A_ij = scale P_ij (dout_i . w_j - delta_i + dlse_i + 2^(lse_i - lse_j) (dout_j . w_i - delta_j + dlse_j))
//   dw_i += sum_j P_ji dout_j + A_ij w_j:  five products per tile.
// Rows that are the columns have a symmetric A, and a tile serves its columns too, with dw_j += sum_i P_ij dout_i +
// A_ij w_i: seven products per pair of tiles.
//
// All others take the row form of backward.h once per direction: three products per tile for the rows as queries, four
// for the rows as keys, and five for both where the rows are the columns.
#pragma once

#include "backward.h"

namespace {

// Largest difference of lse, in bits, whose exponentials one tile serves: with a ratio of that size a weight that
// counts has not underflowed.
constexpr float kSafeRatio = 63.0f;

// The smallest and the largest lse of some tokens, in bits.
struct LseExtent {
  float minimum = INFINITY, maximum = -INFINITY;
  bool finite = true, trusted = true;

  void add(const MssaHead& head, Dtype dtype) {
    for (int64_t n = 0; n < head.seqlen; ++n) {
      const float lse = head.lse[n] * static_cast<float>(kLog2e);
      finite = finite && fabsf(lse) < INFINITY;
      trusted = trusted && fabsf(head.lse[n]) <= trusted_lse(dtype);
      maximum = lse > maximum ? lse : maximum;
      minimum = lse < minimum ? lse : minimum;
    }
  }
  bool safe() const { return finite && trusted && maximum - minimum <= kSafeRatio; }
};

template <class T>
class Mutual {
 public:
  // `columns` has the columns as queries; `middle` is between all lse.
  Mutual(const MssaProblem& p, const MssaHead& rows, const MssaHead& columns, int part, int parts, float middle)
      : p_(p), head_(rows), tiles_(p, rows, part, parts), columns_(columns), middle_(middle) {}

  void run(Arena& arena, float* share) {
    share_ = share;
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    tiles_.keys.find(head_);
    tiles_.pack_keys(keys_rows_);
    for (int j = 0; j < tiles_.keys.blocks; ++j) pack_columns(j);
    for (float& one : ones_) one = 1.0f;
    tiles_.for_each_query_block(false, [this](QueryBlock& b) { block(b); });
  }

 private:
  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile), panel = panel_size<T>(p_.head_dim);
    tiles_.cut(s);
    keys_rows_ = s.floats(padded / T::kPair * tiles_.row_width);
    dout_panels_ = s.floats(padded / kTile * panel);
    dout_rows_ = s.floats(padded / T::kPair * tiles_.row_width);
    delta_ = s.floats(padded);
    dlse_ = s.floats(padded);
    ratio_ = s.floats(padded);
    own_dout_panel_ = s.floats(panel);
    own_dout_rows_ = s.floats(kTile / T::kPair * tiles_.row_width);
  }

  float ratio(float lse) const { return exp2f(static_cast<float>(lse * kLog2e - middle_)); }

  // Packs dout of the columns, their delta, dlse and 2^(middle - lse).
  void pack_columns(int j) {
    const int count = in_block(tiles_.keys.count, j), first = j * kTile;
    const int32_t* const token = tiles_.keys.token + first;
    const int64_t width = staging_width(p_.head_dim);
    stage(columns_.dout, p_.dtype, p_.head_dim, token, count, nullptr, width, tiles_.staging);
    pack_panel<T>(tiles_.staging, width, p_.head_dim, count, dout_panels_ + tiles_.panel_at(j));
    for (int n = 0; n < kTile; ++n) {
      delta_[first + n] = n < count ? columns_.delta[token[n]] : 0.0f;
      dlse_[first + n] = n < count ? columns_.dlse[token[n]] : 0.0f;
      ratio_[first + n] = n < count ? 1.0f / ratio(columns_.lse[token[n]]) : 0.0f;
    }
    tiles_.scale_staged(ratio_ + first, count);
    pack_rows<T>(tiles_.staging, width, tiles_.row_width, count, dout_rows_ + tiles_.rows_at(j));
  }

  void block(QueryBlock& b) {
    const float* const panel = tiles_.pack_queries(b);
    const int64_t width = staging_width(p_.head_dim);
    stage(head_.dout, p_.dtype, p_.head_dim, b.token, b.count, nullptr, width, tiles_.staging);
    pack_panel<T>(tiles_.staging, width, p_.head_dim, b.count, own_dout_panel_);
    alignas(64) float residual[kTile], row_scale[kTile], row_ratio[kTile], value_factor[kTile];
    alignas(64) float delta[kTile], dlse[kTile];
    for (int r = 0; r < kTile; ++r) {
      const bool real = r < b.count;
      const double lse = head_.lse[b.token[r]] * kLog2e;
      b.shift[r] = real ? static_cast<float>(lse) : kNoKeys;
      residual[r] = real ? exp2f(static_cast<float>(b.shift[r] - lse)) : 0.0f;  // the rounding error of the shift
      row_scale[r] = residual[r] * static_cast<float>(p_.scale);
      row_ratio[r] = real ? ratio(head_.lse[b.token[r]]) : 0.0f;
      value_factor[r] = residual[r] * row_ratio[r];
      delta[r] = real ? head_.delta[b.token[r]] : 0.0f;
      dlse[r] = real ? head_.dlse[b.token[r]] : 0.0f;
    }
    const int own = b.token[0] / kTile;
    if (head_.itself) {
      tiles_.scale_staged(residual, b.count);
      pack_rows<T>(tiles_.staging, width, tiles_.row_width, b.count, own_dout_rows_);
    }
    float* const out = share_ + static_cast<int64_t>(b.token[0]) * tiles_.row_width;
    for (int j = 0; j < (head_.itself ? own + 1 : tiles_.keys.blocks); ++j) {
      weights_.compute(tiles_.row_scores(b, panel, j));
      ScoreGradients g = {};
      // The terms of the columns as queries come first: the ratio is theirs.
      g.row = {panel, own_dout_panel_, ones_, dlse, delta};
      g.column = {tiles_.key_panels + tiles_.panel_at(j), dout_panels_ + tiles_.panel_at(j), ones_, dlse_ + j * kTile,
                  delta_ + j * kTile};
      g.words = tiles_.words;
      g.rows = b.count;
      g.columns = b.columns(j);
      g.weights = weights_.exact();
      g.row_scale = row_scale;
      g.row_ratio = row_ratio;
      g.column_ratio = ratio_ + j * kTile;
      compute_gradients<T, true>(g, dscore_tile_);
      accumulate<T, Order::rows>(out, tiles_.row_width, g.rows, g.columns, weights_.operand,
                                 dout_rows_ + tiles_.rows_at(j), value_factor, &dscore_tile_,
                                 keys_rows_ + tiles_.rows_at(j), tiles_.ahead);
      if (head_.itself && j < own) {
        accumulate<T, Order::columns>(share_ + static_cast<int64_t>(j) * kTile * tiles_.row_width, tiles_.row_width,
                                      g.columns, g.rows, weights_.operand, own_dout_rows_, nullptr, &dscore_tile_,
                                      keys_rows_ + tiles_.rows_at(own), tiles_.ahead);
      }
    }
  }

  const MssaProblem& p_;
  const MssaHead& head_;
  HeadTiles<T> tiles_;
  const MssaHead& columns_;
  const float middle_;
  float* share_;
  float *keys_rows_, *dout_panels_, *dout_rows_, *delta_, *dlse_, *ratio_, *own_dout_panel_, *own_dout_rows_;
  alignas(64) float ones_[kTile];
  TileWeights<T> weights_;
  WeightTile<T> dscore_tile_;
};

template <class T>
void mssa_rectangular_backward(const MssaProblem& p, const MssaHead& rows, const MssaHead& columns, int part, int parts,
                               Arena& arena, float* partial) {
  [[maybe_unused]] const typename T::Registers registers;
  const int64_t size = crate_kernels::mssa_partial_size(rows.seqlen, p.head_dim);
  const MssaShares share = shares(p, rows.seqlen, partial + part * size);
  memset(share.as_key, 0, size * sizeof(float));
  LseExtent extent;
  extent.add(rows, p.dtype);
  extent.add(columns, p.dtype);
  const bool all_see = hides_none(p.mask) && rows.key_mask == nullptr && columns.key_mask == nullptr && !p.dropout;
  if (all_see && extent.safe()) {
    Mutual<T>(p, rows, columns, part, parts, 0.5f * (extent.minimum + extent.maximum)).run(arena, share.as_query);
  } else if (rows.itself) {
    Backward<T>(p, rows, part, parts).run_rows(arena, share);
  } else {
    Backward<T>(p, rows, part, parts).run_rows(arena, {nullptr, share.as_query});
    Backward<T>(p, columns, part, parts).run_rows(arena, {share.as_key, nullptr});
  }
}

// Writes the product of each row of dout with the same row of out, summed as the products of tiles are: if one weight
// makes up a row, out is that token, and the backward subtracts equal numbers.
template <class T>
void mssa_rectangular_delta(const MssaProblem& p, const MssaHead& head, Arena& arena, float* delta) {
  [[maybe_unused]] const typename T::Registers registers;
  const int64_t width = staging_width(p.head_dim);
  float *staging, *dout_panel, *out_panel;
  cut_arena(arena, [&](Scratch& s) {
    staging = s.floats(kTile * width);
    dout_panel = s.floats(panel_size<T>(p.head_dim));
    out_panel = s.floats(panel_size<T>(p.head_dim));
  });
  const int rows = static_cast<int>(head.seqlen);
  for (int first = 0; first < rows; first += kTile) {
    const int count = in_block(rows, first / kTile);
    int32_t token[kTile];
    for (int n = 0; n < count; ++n) token[n] = first + n;
    const auto pack = [&](const MssaView& view, float* panel) {
      stage(view, p.dtype, p.head_dim, token, count, nullptr, width, staging);
      pack_panel<T>(staging, width, p.head_dim, count, panel);
    };
    pack(head.dout, dout_panel);
    pack(head.out, out_panel);
    alignas(64) float dots[kTile];
    dot_columns<T>(dout_panel, out_panel, channel_words<T>(p.head_dim), count, dots);
    memcpy(delta + first, dots, count * sizeof(float));
  }
}

}  // namespace
