// Forward of a short head: two products per tile, and none of the passes that pairs and bounds take.
#pragma once

#include "short.h"

namespace {

// The largest number of tokens without a mask. Above it, the products that pairs save cost more than their passes; in
// bf16, products are cheap. One thread of a Zen 5, 8 heads of 64 channels, microseconds: 8 tokens 6.1 (pairs 7.5), of
// bf16 33 tokens 16.8 (18.7), 64 tokens 33.3 (33.5); in fp32 64 tokens 49 (45).
template <class T>
constexpr int kShortForward = T::kPair == 1 ? 32 : kTile;

template <class T>
class ShortForward {
 public:
  ShortForward(const MssaProblem& p, const MssaHead& head, int part, int parts) : short_(p, head, part, parts) {}

  static bool serves(const MssaProblem& p, const MssaHead& head, int parts) {
    const int maximum = hides_none(p.mask) && head.key_mask == nullptr ? kShortForward<T> : kTile;
    // The backward of a range takes scores in bits, and so needs lse of scores that were rounded in bits.
    return ShortHead<T>::serves(p, head, parts) && head.nkeys <= maximum && !p.range;
  }

  void run(Arena& arena) {
    HeadTiles<T>& tiles = short_.tiles;
    cut_arena(arena, [this](Scratch& s) { short_.cut(s); });
    tiles.fetch_ahead(tiles.head.out, {&MssaHead::w});
    short_.find_tokens();
    for (int b = 0; b < tiles.keys.blocks; ++b) short_.pack(tiles.head.keys, b, tiles.key_panels, short_.key_rows);
    for (int i = 0; i < tiles.keys.blocks; ++i) attend(i);
  }

 private:
  void attend(int i) {
    HeadTiles<T>& tiles = short_.tiles;
    short_.weigh(i);
    const QueryBlock& b = short_.blocks[i];
    memset(short_.out, 0, b.count * tiles.row_width * sizeof(float));
    alignas(64) float sums[T::kPair == 1 ? 1 : kTile * kLanes] = {};
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) {
      short_.put_weights(i, j, T::kPair == 1 ? nullptr : sums);
      accumulate<T, Order::rows>(short_.out, tiles.row_width, b.count, b.columns(j), short_.operand,
                                 short_.key_rows + tiles.rows_at(j), nullptr, nullptr, nullptr, tiles.ahead);
    }
    alignas(64) float totals[kTile];
    double shifts[kTile];
    const bool find_exact = !short_.in_double && ExactRows<T>::may_show(tiles.p, b.shift, b.count, kTallScore);
    ExactRows<T> exact_rows(tiles, short_.key_rows, short_.operand);
    for (int r = 0; r < b.count; ++r) {
      totals[r] = T::kPair == 1 ? b.power[r] : sum(load(sums + r * kLanes));
      shifts[r] = b.shift[r] * kLog2e;
    }
    for (int r = 0; find_exact && r < b.count; ++r) exact_rows.add(r, shifts[r], own_score(i, r), totals[r]);
    write_results(tiles.p, tiles.head, tiles.row_width, {b.token, b.count, short_.out, totals, b.power, shifts});
    if constexpr (T::kPair == 1) {
      if (exact_rows.empty()) return;
      exact_rows.write(
          b, [&](int j) { return short_.tile_scores(i, j); },
          [&](const Scores& s, int r, int n) CRATE_LAMBDA { return short_.open(s, r, n); });
    }
  }

  // The score in bits of a row's token with itself; 0 with a scale above 0, where the row's largest is no smaller.
  float own_score(int i, int r) const {
    const HeadTiles<T>& tiles = short_.tiles;
    if (tiles.p.scale > 0) return 0.0f;
    const float* const row = short_.key_rows + tiles.rows_at(i) + r * tiles.row_width;
    return tiles.score_factor * row_dot(row, row, tiles.row_width);
  }

  ShortHead<T> short_;
};

}  // namespace
