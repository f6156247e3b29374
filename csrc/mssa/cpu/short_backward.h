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
class ShortBackward : ShortHead<T> {
  using Base = ShortHead<T>;
  using Base::blocks_, Base::key_rows_, Base::out_, Base::weights_, Base::exact_, Base::tile_, Base::tile_at,
      Base::pack;
  using Base::key_panels_, Base::p_, Base::head_, Base::keys_, Base::width_, Base::panel_at, Base::rows_at,
      Base::ahead_;

 public:
  using Base::Base;

  static bool serves(const MssaProblem& p, const MssaHead& head, int parts) {
    return Base::serves(p, head, parts) && head.delta == nullptr;
  }

  void run(Arena& arena) {
    cut_arena(arena, [this](Scratch& s) { cut(s); });
    Base::fetch_ahead(head_.dw, {&MssaHead::w, &MssaHead::dout});
    Base::find_tokens();
    for (int b = 0; b < keys_.blocks; ++b) {
      pack(head_.keys, b, key_panels_, key_rows_);
      pack(head_.dout, b, dout_panels_, dout_rows_);
    }
    for (int i = 0; i < keys_.blocks; ++i) {
      Base::weigh(i);
      if (exact_) {
        differentiate_exactly();
      } else {
        differentiate(i);
      }
    }
    memset(out_, 0, keys_.count * width_ * sizeof(float));
    Base::for_each_pair([this](int i, int j) { pair(i, j); });
    for (int t = 0; t < keys_.count; ++t) {
      write_row(element(head_.dw, t, p_.result), p_.result, head_.dw.dim_stride, p_.head_dim, out_ + t * width_);
    }
  }

 private:
  void cut(Scratch& s) {
    const int64_t padded = round_up(head_.nkeys, kTile);
    Base::cut(s);
    dout_panels_ = s.floats(padded / kTile * panel_size<T>(p_.head_dim));
    dout_rows_ = s.floats(padded / T::kPair * width_);
    gradients_ = s.floats(padded * padded);
    mirror_ = s.floats(kTile * kTile);
  }

  // Makes the probabilities of block i, and the gradients of its products.
  void differentiate(int i) {
    const Block& b = blocks_[i];
    alignas(64) float deltas[kTile * kLanes] = {};
    Base::for_each_tile(i, [&](int j, int) {
      const Scores s = Base::tile_scores(i, j);
      const float* const weights = weights_ + tile_at(i, j);
      float* const tile = gradients_ + tile_at(i, j);
      Base::multiply_tile(s, dout_panels_ + panel_at(i), [&](auto& x, int r0, int j0) CRATE_LAMBDA {
        for_each_vector(x, [&](Vf& product, int r, int v) CRATE_LAMBDA {
          const int at = (r0 + r) * kTile + j0 + v * kLanes;
          if (s.first != nullptr) product = select(Base::open(s, r0 + r, j0 + v * kLanes), product, Vf{});
          store(tile + at, product);
          float* const total = deltas + (r0 + r) * kLanes;
          store(total, load(total) + load(weights + at) * product);
        });
      });
    });
    for (int r = 0; r < b.count; ++r) {
      const float total = b.power[r], inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const float delta = total == 0.0f ? 0.0f : sum(load(deltas + r * kLanes)) / total;
      const float dlse = head_.dlse == nullptr ? 0.0f : head_.dlse[b.token[r]];
      const float scale = static_cast<float>(p_.scale);
      Base::for_each_tile(i, [&](int j, int vectors) {
        const int64_t row = tile_at(i, j) + r * kTile;
        for (int n = 0; n < vectors * kLanes; n += kLanes) {
          const Vf probability = load(weights_ + row + n) * inverse;
          store(weights_ + row + n, probability);
          store(gradients_ + row + n, scale * probability * (load(gradients_ + row + n) - delta + dlse));
        }
      });
    }
    Base::for_each_tile(i, [&](int j, int) { clear_tail(i, j); });
  }

  // The same of the only tile, in double: where one weight is nearly all of its row, a product less delta is small
  // beside both, and multiplies a long token.
  void differentiate_exactly() {
    const Block& b = blocks_[0];
    if (b.tiles.stop == 0) return;
    const Scores s = Base::tile_scores(0, 0);
    for (int first = 0; first < b.count; first += kRowsAtOnce) {
      alignas(64) double products[kRowsAtOnce][kTile];
      Base::exact_products(s, dout_panels_, first, products);
      for (int r = first; r < b.count && r < first + kRowsAtOnce; ++r) differentiate_row(s, r, products[r - first]);
    }
    clear_tail(0, 0);
  }

  void differentiate_row(const Scores& s, int r, double* products) {
    float* const weights = weights_ + r * kTile;
    double total = 0.0, delta = 0.0;
    for (int n = 0; n < s.columns; ++n) {
      if (!Base::is_open(s, r, n)) products[n] = 0.0;
      total += weights[n];
      delta += weights[n] * products[n];
    }
    const double inverse = total == 0.0 ? 0.0 : 1.0 / total, dlse = head_.dlse == nullptr ? 0.0 : head_.dlse[r];
    delta *= inverse;
    for (int n = 0; n < round_up(s.columns, kLanes); ++n) {
      const double probability = weights[n] * inverse;
      weights[n] = static_cast<float>(probability);
      gradients_[r * kTile + n] = static_cast<float>(p_.scale * probability * (products[n] - delta + dlse));
    }
  }

  // What is transposed is whole blocks.
  void clear_tail(int i, int j) {
    const int rows = blocks_[i].count;
    float* const tile = gradients_ + tile_at(i, j);
    memset(tile + rows * kTile, 0, (round_up(rows, kLanes) - rows) * kTile * sizeof(float));
  }

  // Adds what tile (i, j) and its mirror image give.
  void pair(int i, int j) {
    if (!Base::sees_some(i, j)) return;
    const int rows = blocks_[i].count, columns = blocks_[j].count;
    const bool mirrored = Base::sees_some(j, i);
    Base::put_weights(i, j, nullptr);
    put_gradients(i, j, mirrored);
    accumulate<T, Order::columns>(out_ + j * kTile * width_, width_, columns, rows, tile_, dout_rows_ + rows_at(i),
                                  nullptr, &gradient_, key_rows_ + rows_at(i), ahead_);
    if (i == j) return;
    accumulate<T, Order::rows>(out_ + i * kTile * width_, width_, rows, columns, gradient_, key_rows_ + rows_at(j),
                               nullptr, nullptr, nullptr, ahead_);
    if (!mirrored) return;
    Base::put_weights(j, i, nullptr);
    accumulate<T, Order::columns>(out_ + i * kTile * width_, width_, rows, columns, tile_, dout_rows_ + rows_at(j),
                                  nullptr, nullptr, nullptr, ahead_);
  }

  // G_ij + G_ji of tile (i, j).
  void put_gradients(int i, int j, bool mirrored) {
    const int rows = blocks_[i].count, columns = blocks_[j].count;
    const float *const from = gradients_ + tile_at(i, j), *const image = gradients_ + tile_at(j, i);
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
      gradient_.put(x, r0, v0);
    });
    gradient_.complete(rows, columns, i == j);
  }

  float *dout_panels_, *dout_rows_;
  float* gradients_;  // of all tiles: products, then G
  float* mirror_;
  WeightTile<T> gradient_;
};

}  // namespace
