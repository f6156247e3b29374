// A short head: the weights of all its tiles are held at once, and shifted by the maxima of their rows.
//
// Scores and maxima are in nats, as eager has them: in bits the largest would be infinite.
#pragma once

#include "exact_rows.h"

namespace {

constexpr int kShortBlocks = 2;  // with more, the tiles leave the caches, and pairs have fewer products

// In a head of so few tokens all rows are computed from exact products where one has a tall score.
constexpr int kFewTokens = 32;
static_assert(kFewTokens <= kTile, "exact products are of one tile");

template <class T>
struct ShortHead {
  ShortHead(const MssaProblem& p, const MssaHead& head, int part, int parts) : tiles(p, head, part, parts) {}

  // True if the scores of a head's own tokens give all that is needed.
  static bool serves(const MssaProblem& p, const MssaHead& head, int parts) {
    return parts == 1 && head.itself && head.nkeys <= kShortBlocks * kTile && !p.dropout && !p.threshold;
  }

  void cut(Scratch& s) {
    const int64_t padded = round_up(tiles.head.nkeys, kTile);
    tiles.cut(s);
    key_rows = s.floats(padded / T::kPair * tiles.row_width);
    out = s.floats(padded * tiles.row_width);
    weights = s.floats(padded * padded);
    key_lanes = s.ints(padded);
  }

  // Numbers all tokens as keys. Padded ones attend, so they keep their places, and are masked as keys.
  void find_tokens() {
    MssaHead all = tiles.head;
    all.key_mask = nullptr;
    tiles.keys.find(all);
    for (int t = 0; t < tiles.keys.count; ++t) key_lanes[t] = -static_cast<int32_t>(KeyList::is_key(tiles.head, t));
  }

  // Packs block b of a view as a panel and as rows.
  void pack(const MssaView& view, int b, float* panels, float* rows) {
    constexpr bool kStaged = T::kPair == 1;  // staged rows are packed rows
    const int64_t width = kStaged ? tiles.row_width : staging_width(tiles.p.head_dim);
    const int count = in_block(tiles.keys.count, b);
    float* const staged = kStaged ? rows + tiles.rows_at(b) : tiles.staging;
    if (view.data == nullptr) {
      memset(staged, 0, round_up(count, kLanes) * width * sizeof(float));
    } else {
      stage(view, tiles.p.dtype, tiles.p.head_dim, tiles.keys.token + b * kTile, count, nullptr, width, staged);
    }
    pack_panel<T>(staged, width, tiles.p.head_dim, count, panels + tiles.panel_at(b));
    if (!kStaged) pack_rows<T>(staged, width, tiles.row_width, count, rows + tiles.rows_at(b));
  }

  // Calls body(j, vectors in a row) for the tiles of which block i sees some.
  template <class Body>
  void for_each_tile(int i, const Body& body) const {
    for (int j = blocks[i].tiles.first; j < blocks[i].tiles.stop; ++j) {
      body(j, (in_block(tiles.keys.count, j) + kLanes - 1) / kLanes);
    }
  }

  int64_t tile_at(int i, int j) const { return (static_cast<int64_t>(i) * tiles.keys.blocks + j) * kTile * kTile; }
  bool sees_some(int i, int j) const { return blocks[i].tiles.first <= j && j < blocks[i].tiles.stop; }

  // The lanes of the vector at column j of a tile that row r sees.
  CRATE_INLINE Vi open(const Scores& s, int r, int j) const {
    Vi lanes = seen(s, r, j);
    if (tiles.head.key_mask != nullptr) {
      Vi keys;
      memcpy(&keys, key_lanes + s.start + j, sizeof keys);
      lanes &= keys;
    }
    return lanes;
  }

  // Whether row r sees column j.
  bool is_open(const Scores& s, int r, int j) const {
    if (s.first == nullptr) return true;
    const int key = s.start + j;
    return s.first[r] <= key && key < s.stop[r] && key_lanes[key] != 0;
  }

  // Calls body(products of rows r0.. and columns j0.., Int<rows>, r0, Int<columns>, j0) for the vectors of a tile.
  template <class Body>
  void multiply_tile(const Scores& s, const float* left, const Body& body) const {
    const ChannelProducts<T> products(left, s.key_panel, s.words, s.rows, s.columns);
    by_length<T>(s.words, [&](auto longer) CRATE_LAMBDA {
      constexpr int kLong = decltype(longer)::value;
      for_groups<T>(s.rows, s.columns, false, [&](auto rows, int r0, auto columns, int v0) CRATE_LAMBDA {
        Vf x[decltype(rows)::value][decltype(columns)::value] = {};
        products.template add<kLong>(x, r0, v0 * kLanes);
        body(x, r0, v0 * kLanes);
      });
    });
  }

  Scores tile_scores(int i, int j) const {
    Scores s = tiles.row_scores(blocks[i], tiles.key_panels + tiles.panel_at(i), j);
    if (tiles.head.key_mask != nullptr && s.first == nullptr) {
      s.first = blocks[i].first;
      s.stop = blocks[i].stop;
      s.start = j * kTile;
    }
    return s;
  }

  // find_bounds(), in a few stores where no row differs.
  void find_spans(QueryBlock& b) const {
    if (!hides_none(tiles.p.mask)) return tiles.find_bounds(b);
    b.any = b.all = {0, tiles.keys.count};
    b.tiles = {0, tiles.keys.blocks};
    for (int r = 0; r < kTile; ++r) {
      b.first[r] = 0;
      b.stop[r] = tiles.keys.count;
    }
  }

  CRATE_INLINE void put_score(const Scores& s, Vf score, int r, int column, float* tile, float* maxima) const {
    if (s.first != nullptr) score = select(open(s, r, column), score, splat(-INFINITY));
    store(tile + r * kTile + column, score);
    float* const largest = maxima + r * kLanes;
    store(largest, max(load(largest), score));
  }

  // Rows after the last, to whole groups of exponentials, have weights of 0.
  static void shift_by(const float* maxima, QueryBlock& b) {
    for (int r = 0; r < round_up(b.count, kRowsAtOnce); ++r) {
      const float largest = r < b.count ? max(load(maxima + r * kLanes)) : 0.0f;
      b.shift[r] = largest == -INFINITY ? kNoKeys : largest;
    }
  }

  // The first row of the only block whose scores are summed in double; b.count: none. A row has a tall score if its
  // maximum is, or with a scale below 0 its token's with itself. No row depends on tokens that it does not see.
  int first_exact(const QueryBlock& b) const {
    for (int r = 0; r < b.count; ++r) {
      const float own = weights[r * kTile + r];
      if ((b.shift[r] >= kTallScore && b.shift[r] != kNoKeys) || (own <= -kTallScore && own != -INFINITY)) {
        return hides_none(tiles.p.mask) ? 0 : r;
      }
    }
    return b.count;
  }

  // Makes the scores of the only tile's rows from `first` on again, each rounded once.
  void score_exactly(int first, float* maxima) {
    const QueryBlock& b = blocks[0];
    const Scores s = tile_scores(0, 0);
    for (int n = first * kLanes; n < b.count * kLanes; n += kLanes) store(maxima + n, splat(-INFINITY));
    for (int r = first; r < b.count; r += kRowsAtOnce) {
      alignas(64) double products[kRowsAtOnce][kTile];
      alignas(64) float scores[kTile];
      exact_products(s, s.query_panel, {r, r + 1, r + 2, r + 3}, products);
      for (int k = 0; k < kRowsAtOnce && r + k < b.count; ++k) {
        const int columns = round_up(s.columns, kLanes);
        for (int n = 0; n < columns; ++n) scores[n] = static_cast<float>(tiles.p.scale * products[k][n]);
        for (int n = 0; n < columns; n += kLanes) put_score(s, load(scores + n), r + k, n, weights, maxima);
      }
    }
  }

  // Makes the weights of block i, and their sums.
  void weigh(int i) {
    QueryBlock& b = blocks[i];
    b.count = in_block(tiles.keys.count, i);
    memcpy(b.token, tiles.keys.token + i * kTile, b.count * sizeof(int32_t));
    find_spans(b);
    alignas(64) float maxima[kTile * kLanes], sums[kTile * kLanes];
    for (int n = 0; n < round_up(b.count, kRowsAtOnce) * kLanes; n += kLanes) {
      store(maxima + n, splat(-INFINITY));
      store(sums + n, Vf{});
    }
    for_each_tile(i, [&](int j, int) {
      const Scores s = tile_scores(i, j);
      float* const tile = weights + tile_at(i, j);
      multiply_tile(s, s.query_panel, [&](auto& x, int r0, int j0) CRATE_LAMBDA {
        for_each_vector(x, [&](Vf& score, int r, int v) CRATE_LAMBDA {
          score = rounded(score * static_cast<float>(tiles.p.scale));
          put_score(s, score, r0 + r, j0 + v * kLanes, tile, maxima);
        });
      });
    });
    shift_by(maxima, b);
    const int first = tiles.p.dtype == Dtype::f32 && tiles.keys.count <= kFewTokens ? first_exact(b) : b.count;
    in_double = first < b.count;
    if (in_double) {
      score_exactly(first, maxima);
      shift_by(maxima, b);
    }
    for_each_tile(i, [&](int j, int vectors) {
      float* const tile = weights + tile_at(i, j);
      for (int n = 0; n < vectors * kLanes; n += kLanes) {
        for (int r = b.count; r < round_up(b.count, kRowsAtOnce); ++r) store(tile + r * kTile + n, splat(-INFINITY));
        for (int r = 0; r < b.count; r += kRowsAtOnce) {
          Vf x[kRowsAtOnce];
          for (int k = 0; k < kRowsAtOnce; ++k) {
            x[k] = static_cast<float>(kLog2e) * (load(tile + (r + k) * kTile + n) - b.shift[r + k]);
          }
          exp2(x);
          for (int k = 0; k < kRowsAtOnce; ++k) {
            store(tile + (r + k) * kTile + n, x[k]);
            float* const total = sums + (r + k) * kLanes;
            store(total, load(total) + x[k]);
          }
        }
      }
    });
    for (int r = 0; r < b.count; ++r) b.power[r] = sum(load(sums + r * kLanes));
  }

  // Makes the left operand of products with the values from a tile's weights, and adds the rounded ones to `sums`, by
  // row; null: not wanted.
  void put_weights(int i, int j, float* sums) {
    const int rows = blocks[i].count, columns = blocks[j].count;
    const float* const from = weights + tile_at(i, j);
    for_groups<T>(rows, columns, false, [&](auto height, int r0, auto width, int v0) CRATE_LAMBDA {
      Vf x[decltype(height)::value][decltype(width)::value];
      for_each_vector(x,
                      [&](Vf& e, int r, int v) CRATE_LAMBDA { e = load(from + (r0 + r) * kTile + (v0 + v) * kLanes); });
      operand.put(x, r0, v0);
      if (sums == nullptr) return;
      for_each_vector(x, [&](Vf& e, int r, int) CRATE_LAMBDA {
        float* const total = sums + (r0 + r) * kLanes;
        store(total, load(total) + e);
      });
    });
    operand.complete(rows, columns, false);
  }

  HeadTiles<T> tiles;
  QueryBlock blocks[kShortBlocks];  // power: the sums of weights
  float* key_rows;
  float* out;
  float* weights;         // of all tiles: scores, then weights
  bool in_double;         // some scores were summed in double
  int32_t* key_lanes;     // by token: all bits of a key's, or none
  WeightTile<T> operand;  // of a tile's weights
};

}  // namespace
