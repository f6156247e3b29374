// Forward of a short head: two products per tile, and none of the passes that pairs and bounds take.
#pragma once

#include "results.h"
#include "short.h"

namespace {

// The most tokens without a mask. Above, pairs spare more products than their passes cost; of bf16 a tile's products
// are cheap. One thread of a Zen 5, 8 heads of 64 channels, microseconds: 8 tokens 6.1 (pairs 7.5), of bf16 33
// tokens 16.8 (18.7), 64 tokens 33.3 (33.5); in fp32 64 tokens 49 (45).
template <class T>
constexpr int kShortForward = T::kPair == 1 ? 32 : kTile;

template <class T>
class ShortForward : ShortHead<T> {
  using Base = ShortHead<T>;
  using Base::blocks_, Base::key_rows_, Base::out_, Base::tile_;
  using Base::key_panels_, Base::p_, Base::head_, Base::keys_, Base::width_, Base::rows_at, Base::ahead_;

 public:
  using Base::Base;

  static bool serves(const MssaProblem& p, const MssaHead& head, int parts) {
    const int most = hides_none(p.mask) && head.keep == nullptr ? kShortForward<T> : kTile;
    // The backward of a range takes scores in bits, and so needs lse of scores that were rounded in bits.
    return Base::serves(p, head, parts) && head.nkeys <= most && !p.range;
  }

  void run(Arena& arena) {
    cut_arena(arena, [this](Scratch& s) { Base::cut(s); });
    Base::fetch_ahead(head_.out, {&MssaHead::w});
    Base::find_tokens();
    for (int b = 0; b < keys_.blocks; ++b) Base::pack(head_.keys, b, key_panels_, key_rows_);
    for (int i = 0; i < keys_.blocks; ++i) attend(i);
  }

 private:
  void attend(int i) {
    Base::weigh(i);
    const Block& b = blocks_[i];
    memset(out_, 0, b.count * width_ * sizeof(float));
    alignas(64) float sums[T::kPair == 1 ? 1 : kTile * kLanes] = {};
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      Base::put_weights(i, j, T::kPair == 1 ? nullptr : sums);
      accumulate<T, Order::rows>(out_, width_, b.count, b.columns(j), tile_, key_rows_ + rows_at(j), nullptr, nullptr,
                                 nullptr, ahead_);
    }
    alignas(64) float totals[kTile];
    double shifts[kTile];
    for (int r = 0; r < b.count; ++r) {
      totals[r] = T::kPair == 1 ? b.power[r] : sum(load(sums + r * kLanes));
      shifts[r] = b.shift[r] * kLog2e;
    }
    write_results(p_, head_, width_, {b.token, b.count, out_, totals, b.power, shifts});
  }
};

}  // namespace
