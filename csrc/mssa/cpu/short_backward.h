// Backward of a short head. With all weights at hand, four products per tile:
//   P_ij = 2^(S_ij - max_i) / l_i,  delta_i = sum_j P_ij dout_i . w_j,
//   G_ij = scale P_ij (dout_i . w_j - delta_i + dlse_i),  dw_j = sum_i P_ij dout_i + (G_ij + G_ji) w_i.
//
// Nothing comes from the forward's results: delta sums the very weights and products that it is subtracted from, as
// eager's does. Where one weight is all of its row, the difference is 0 to the bit.
#pragma once

#include "short.h"

namespace {

template <class T>
class ShortBackward {
 public:
  ShortBackward(const MssaProblem& p, const MssaHead& head, int part, int parts) : short_(p, head, part, parts) {}

  static bool serves(const MssaProblem& p, const MssaHead& head, int parts) {
    return ShortHead<T>::serves(p, head, parts) && head.delta == nullptr;
  }

  void run(Arena& arena) {
    HeadTiles<T>& tiles = short_.tiles;
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    tiles.fetch_ahead(tiles.head.dw, {&MssaHead::w, &MssaHead::dout});
    short_.find_tokens();
    for (int b = 0; b < tiles.keys.blocks; ++b) {
      short_.pack(tiles.head.keys, b, tiles.key_panels, short_.key_rows);
      short_.pack(tiles.head.dout, b, dout_panels_, dout_rows_);
    }
    for (int i = 0; i < tiles.keys.blocks; ++i) {
      short_.weigh(i);
      if (short_.in_double) {
        differentiate_exactly();
      } else {
        differentiate(i);
      }
    }
    memset(short_.out, 0, tiles.keys.count * tiles.row_width * sizeof(float));
    tiles.for_each_pair([this](int i, int j) { pair(i, j); });
    for (int t = 0; t < tiles.keys.count; ++t) {
      write_row(element(tiles.head.dw, t, tiles.p.result), tiles.p.result, tiles.head.dw.dim_stride, tiles.p.head_dim,
                short_.out + t * tiles.row_width);
    }
  }

 private:
  void cut(Scratch& s) {
    const HeadTiles<T>& tiles = short_.tiles;
    const int64_t padded = round_up(tiles.head.nkeys, kTile);
    short_.cut(s);
    dout_panels_ = s.floats(padded / kTile * panel_size<T>(tiles.p.head_dim));
    dout_rows_ = s.floats(padded / T::kPair * tiles.row_width);
    dscores_ = s.floats(padded * padded);
    mirror_ = s.floats(kTile * kTile);
  }

  // Makes the probabilities of block i, and the gradients of its products.
  void differentiate(int i) {
    const HeadTiles<T>& tiles = short_.tiles;
    const QueryBlock& b = short_.blocks[i];
    alignas(64) float deltas[kTile * kLanes] = {};
    short_.for_each_tile(i, [&](int j, int) {
      const Scores s = short_.tile_scores(i, j);
      const float* const weights = short_.weights + short_.tile_at(i, j);
      float* const tile = dscores_ + short_.tile_at(i, j);
      short_.multiply_tile(s, dout_panels_ + tiles.panel_at(i), [&](auto& x, int r0, int j0) CRATE_LAMBDA {
        for_each_vector(x, [&](Vf& product, int r, int v) CRATE_LAMBDA {
          const int at = (r0 + r) * kTile + j0 + v * kLanes;
          if (s.first != nullptr) product = select(short_.open(s, r0 + r, j0 + v * kLanes), product, Vf{});
          store(tile + at, product);
          float* const total = deltas + (r0 + r) * kLanes;
          store(total, load(total) + load(weights + at) * product);
        });
      });
    });
    for (int r = 0; r < b.count; ++r) {
      const float total = b.power[r], inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const float delta = total == 0.0f ? 0.0f : sum(load(deltas + r * kLanes)) / total;
      const float dlse = tiles.head.dlse == nullptr ? 0.0f : tiles.head.dlse[b.token[r]];
      const float scale = static_cast<float>(tiles.p.scale);
      short_.for_each_tile(i, [&](int j, int vectors) {
        const int64_t row = short_.tile_at(i, j) + r * kTile;
        for (int n = 0; n < vectors * kLanes; n += kLanes) {
          const Vf probability = load(short_.weights + row + n) * inverse;
          store(short_.weights + row + n, probability);
          store(dscores_ + row + n, scale * probability * (load(dscores_ + row + n) - delta + dlse));
        }
      });
    }
    short_.for_each_tile(i, [&](int j, int) { clear_tail(i, j); });
  }

  // The same of the only tile, in double: where one weight is nearly all of its row, a product less delta is small
  // beside both, and multiplies a long token.
  void differentiate_exactly() {
    const QueryBlock& b = short_.blocks[0];
    if (b.tiles.stop == 0) return;
    const Scores s = short_.tile_scores(0, 0);
    for (int first = 0; first < b.count; first += kRowsAtOnce) {
      alignas(64) double products[kRowsAtOnce][kTile];
      exact_products(s, dout_panels_, {first, first + 1, first + 2, first + 3}, products);
      for (int r = first; r < b.count && r < first + kRowsAtOnce; ++r) differentiate_row(s, r, products[r - first]);
    }
    clear_tail(0, 0);
  }

  void differentiate_row(const Scores& s, int r, double* products) {
    const HeadTiles<T>& tiles = short_.tiles;
    float* const weights = short_.weights + r * kTile;
    double total = 0.0, delta = 0.0;
    for (int n = 0; n < s.columns; ++n) {
      if (!short_.is_open(s, r, n)) products[n] = 0.0;
      total += weights[n];
      delta += weights[n] * products[n];
    }
    const double inverse = total == 0.0 ? 0.0 : 1.0 / total,
                 dlse = tiles.head.dlse == nullptr ? 0.0 : tiles.head.dlse[r];
    delta *= inverse;
    for (int n = 0; n < round_up(s.columns, kLanes); ++n) {
      const double probability = weights[n] * inverse;
      weights[n] = static_cast<float>(probability);
      dscores_[r * kTile + n] = static_cast<float>(tiles.p.scale * probability * (products[n] - delta + dlse));
    }
  }

  // What is transposed is whole blocks.
  void clear_tail(int i, int j) {
    const int rows = short_.blocks[i].count;
    float* const tile = dscores_ + short_.tile_at(i, j);
    memset(tile + rows * kTile, 0, (round_up(rows, kLanes) - rows) * kTile * sizeof(float));
  }

  // Adds what tile (i, j) and its mirror image give.
  void pair(int i, int j) {
    HeadTiles<T>& tiles = short_.tiles;
    if (!short_.sees_some(i, j)) return;
    const int rows = short_.blocks[i].count, columns = short_.blocks[j].count;
    const bool mirrored = short_.sees_some(j, i);
    short_.put_weights(i, j, nullptr);
    put_dscores(i, j, mirrored);
    accumulate<T, Order::columns>(short_.out + j * kTile * tiles.row_width, tiles.row_width, columns, rows,
                                  short_.operand, dout_rows_ + tiles.rows_at(i), nullptr, &dscore_tile_,
                                  short_.key_rows + tiles.rows_at(i), tiles.ahead);
    if (i == j) return;
    accumulate<T, Order::rows>(short_.out + i * kTile * tiles.row_width, tiles.row_width, rows, columns, dscore_tile_,
                               short_.key_rows + tiles.rows_at(j), nullptr, nullptr, nullptr, tiles.ahead);
    if (!mirrored) return;
    short_.put_weights(j, i, nullptr);
    accumulate<T, Order::columns>(short_.out + i * kTile * tiles.row_width, tiles.row_width, rows, columns,
                                  short_.operand, dout_rows_ + tiles.rows_at(j), nullptr, nullptr, nullptr,
                                  tiles.ahead);
  }

  // G_ij + G_ji of tile (i, j).
  void put_dscores(int i, int j, bool mirrored) {
    const int rows = short_.blocks[i].count, columns = short_.blocks[j].count;
    const float *const from = dscores_ + short_.tile_at(i, j), *const image = dscores_ + short_.tile_at(j, i);
    for (int r = 0; mirrored && r < rows; r += kLanes) {
      for (int c = i == j ? r : 0; c < columns; c += kLanes) {
        transpose_block(image + c * kTile + r, kTile, mirror_ + r * kTile + c, kTile);
      }
    }
    for_groups<T>(rows, columns, i == j, [&](auto height, int r0, auto width, int v0) CRATE_LAMBDA {
      Vf x[decltype(height)::value][decltype(width)::value];
      for_each_vector(x, [&](Vf& g, int r, int v) CRATE_LAMBDA {
        const int at = (r0 + r) * kTile + (v0 + v) * kLanes;
        g = mirrored ? load(from + at) + load(mirror_ + at) : load(from + at);
      });
      dscore_tile_.put(x, r0, v0);
    });
    dscore_tile_.complete(rows, columns, i == j);
  }

  ShortHead<T> short_;
  float *dout_panels_, *dout_rows_;
  float* dscores_;  // (tiles, kTile, kTile): products, then G
  float* mirror_;
  WeightTile<T> dscore_tile_;
};

}  // namespace
