// Forward of a short head: two products per tile, and none of the passes that pairs and bounds take.
#pragma once

#include "results.h"
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
    for (int r = 0; r < b.count; ++r) {
      totals[r] = T::kPair == 1 ? b.power[r] : sum(load(sums + r * kLanes));
      shifts[r] = b.shift[r] * kLog2e;
    }
    write_results(tiles.p, tiles.head, tiles.row_width, {b.token, b.count, short_.out, totals, b.power, shifts});
  }

  ShortHead<T> short_;
};

}  // namespace
