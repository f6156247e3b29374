// State of one head, for the forward and the backward: its keys, their packing, softmax shifts.
#pragma once

#include "../../common/cpu/scratch.h"
#include "kernels.h"
#include "scores.h"

namespace {

using crate_kernels::MssaHead;
using crate_kernels::MssaProblem;
using crate_kernels::MssaShares;
using crate_kernels::MssaView;
using crate_kernels::mssa::Span;

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Largest spread of |w_i|^2 scale / 2, in bits, that is safe without a maximum: 60 nats. Beyond about 80, 1 / l
// overflows.
constexpr float kSafeSpread = 86.5f;
// Largest h, in bits, for the forms without maxima. Scores of this size are rounded to 2^-10. From 2^29 on, the
// rounding makes weights of nearly equal tokens overflow.
constexpr float kSafeHeight = 4096.0f;
constexpr float kSafeHeightOfRange = 16.0f;  // scores of 22 nats
// Smallest level of phi = "threshold" for rows that are shifted by bounds: their sum may be so small that weights above
// a smaller level underflow.
constexpr float kMinLevel = 0x1p-38f;
// The shift of a row without keys: its weights become 0.
constexpr float kNoKeys = 1e30f;

// The tokens that are keys, numbered in order; padded ones leave no gap.
struct KeyList {
  int count = 0;
  int blocks = 0;
  int32_t* token;  // token of each key; zero in the padding to whole tiles
  int32_t* rank;   // number of keys before each token, and before the end

  void find(const MssaHead& head) {
    for (int64_t t = 0; t < head.nkeys; ++t) {
      rank[t] = count;
      if (is_key(head, t)) token[count++] = static_cast<int32_t>(t);
    }
    rank[head.nkeys] = count;
    blocks = (count + kTile - 1) / kTile;
    for (int n = count; n < blocks * kTile; ++n) token[n] = 0;
  }
  static bool is_key(const MssaHead& head, int64_t t) { return head.key_mask == nullptr || head.key_mask[t] != 0; }
};

// Row width of the staging buffer: whole vectors, and whole words of two elements.
CRATE_INLINE int64_t staging_width(int head_dim) {
  return round_up(head_dim, 2 * kLanes);
}

// Reads up to kTile tokens of a view as rows of `width` floats, times factor[n] if factor is not null. The rows after
// them, to whole vectors of tokens, are zero.
CRATE_INLINE void stage(const MssaView& view, Dtype dtype, int head_dim, const int32_t* token, int count,
                        const float* factor, int64_t width, float* rows) {
  // Copies a known length in vectors: one memcpy per row took 5% of a forward of 197 tokens.
  const bool whole_vectors = view.dim_stride == 1 && head_dim % kLanes == 0;
  for (int n = 0; n < count; ++n) {
    float* const row = rows + n * width;
    const char* const source = element(view, token[n], dtype);
    const float by = factor == nullptr ? 1.0f : factor[n];
    if (whole_vectors && dtype == Dtype::f32) {
      const float* const from = reinterpret_cast<const float*>(source);
      for (int d = 0; d < head_dim; d += kLanes) store(row + d, load(from + d) * by);
    } else if (whole_vectors && dtype == Dtype::bf16) {
      const uint16_t* const from = reinterpret_cast<const uint16_t*>(source);
      for (int d = 0; d < head_dim; d += kLanes) store(row + d, load_bf16(from + d) * by);
    } else {
      read_row(source, dtype, view.dim_stride, head_dim, row);
      if (factor != nullptr) {
        for (int d = 0; d < head_dim; ++d) row[d] *= by;
      }
    }
    for (int64_t d = head_dim; d < width; ++d) row[d] = 0.0f;
  }
  memset(rows + count * width, 0, (round_up(count, kLanes) - count) * width * sizeof(float));
}

CRATE_INLINE float row_dot(const float* a, const float* b, int64_t width) {
  Vf total = {};
  for (int64_t d = 0; d < width; d += kLanes) total += load(a + d) * load(b + d);
  return sum(total);
}

// Tokens of block `block` among `count`.
CRATE_INLINE int in_block(int count, int block) {
  return count - block * kTile < kTile ? count - block * kTile : kTile;
}

// True if `part` computes query block `block` of a triangle: parts have about equal work.
CRATE_INLINE bool owns_block(int block, int part, int parts) {
  const int place = block % (2 * parts);
  return part == (place < parts ? place : 2 * parts - 1 - place);
}

// A number of bits, below 2^22, rounded to an integer.
CRATE_INLINE float whole_bits(float bits) {
  const float magic = 12582912.0f;
  return (bits + magic) - magic;
}

// h = S_ii / 2 in bits, rounded to an integer. Any value near S_ii / 2 serves. Integers are subtracted from exponents,
// and products with 2^h are exact, so neither the scores nor the masses of the values are rounded.
CRATE_INLINE float half_norm(const float* row, int64_t width, float factor) {
  return whole_bits(0.5f * factor * row_dot(row, row, width));
}

// The smallest and the largest h of some keys.
struct HalfNormRange {
  float minimum = INFINITY, maximum = -INFINITY;

  // Reads half_norm by whole vectors.
  HalfNormRange(const float* half_norm, int count) {
    Vf lowest = splat(minimum), highest = splat(maximum);
    for (int n = 0; n < count; n += kLanes) {
      const Vf h = load(half_norm + n);
      const Vi inside = iota() + n < count;
      highest = max(select(inside, h, highest), highest);
      lowest = -max(-select(inside, h, lowest), -lowest);
    }
    maximum = max(highest);
    minimum = -max(-lowest);
  }
  // True if a head of at most this height needs no row maxima: with scale > 0, S_ij <= (S_ii + S_jj) / 2, so
  // 2^(S_ij - h_i - h_j) is at most 2 for h near S_ii / 2, and the row sum is at least 2^(h_i - max h) / 2.
  bool safe(float height) const { return maximum - minimum <= kSafeSpread && maximum <= height; }
};

// A block of queries, the keys [first, stop) that each sees, and what is subtracted from their scores.
struct QueryBlock {
  int count;
  Span any, all;  // keys between the first and the last that some row sees; keys that every row sees
  Span tiles;     // of `any`
  int32_t token[kTile], first[kTile], stop[kTile];
  alignas(64) float shift[kTile], power[kTile];  // power: integers
  bool shifted = true, powered = false;          // whether a row has one

  bool has_keys(int r) const { return r < count && first[r] < stop[r]; }
  int columns(int j) const { return in_block(any.stop, j); }
  bool cuts(int j) const { return j * kTile < all.first || all.stop < (j + 1) * kTile; }
};

// State of one head in either direction; `T` packs its words.
template <class T>
struct HeadTiles {
  const MssaProblem& p;
  const MssaHead& head;
  const int part, parts;
  const int row_width, words;  // of a token: floats of a packed row, words of a panel
  const float score_factor;    // scale * log2(e)
  KeyList keys;
  Ahead ahead;
  float *key_panels, *query_panel;
  float *half_norms, *masses;  // by key
  float* running_max;          // by key: the largest half norm up to it
  float* staging;              // kTile rows
  float* dropout;              // factors of a tile
  bool huge = false;           // a key's own score is, or would be if it were a number

  HeadTiles(const MssaProblem& p, const MssaHead& head, int part, int parts)
      : p(p),
        head(head),
        part(part),
        parts(parts),
        row_width(padded_dim(p.head_dim)),
        words(channel_words<T>(p.head_dim)),
        score_factor(static_cast<float>(p.scale * kLog2e)) {}

  // Cuts what both directions use.
  void cut(Scratch& s) {
    const int64_t padded = round_up(head.nkeys, kTile), panel = panel_size<T>(p.head_dim);
    keys.token = s.ints(padded);
    keys.rank = s.ints(head.nkeys + 1);
    key_panels = s.floats(padded / kTile * panel);
    query_panel = s.floats(panel);
    half_norms = s.floats(padded);
    masses = s.floats(padded);
    running_max = s.floats(padded);
    staging = s.floats(kTile * staging_width(p.head_dim));
    dropout = s.floats(p.dropout ? kTile * kTile : 0);
  }

  // Packs the keys as panels and, if wanted, as rows; computes their h.
  void pack_keys(float* rows) {
    const int64_t width = staging_width(p.head_dim);
    for (int b = 0; b < keys.blocks; ++b) {
      const int count = in_block(keys.count, b);
      stage_keys(b, count, nullptr);
      pack_panel<T>(staging, width, p.head_dim, count, key_panels + panel_at(b));
      if (rows != nullptr) pack_rows<T>(staging, width, row_width, count, rows + rows_at(b));
      for (int n = 0; n < round_up(count, kLanes); ++n) {
        const float h = half_norms[b * kTile + n] = half_norm(staging + n * width, width, score_factor);
        huge = huge || (score_factor != 0.0f && !(fabsf(h) < 0.25f * kHugeScore));
      }
    }
  }

  void stage_keys(int block, int count, const float* factor) {
    const int32_t* const token = keys.token + block * kTile;
    stage(head.keys, p.dtype, p.head_dim, token, count, factor, staging_width(p.head_dim), staging);
  }

  void scale_staged(const float* factor, int count) {
    const int64_t width = staging_width(p.head_dim);
    for (int n = 0; n < count; ++n) {
      for (int64_t d = 0; d < width; d += kLanes) {
        store(staging + n * width + d, load(staging + n * width + d) * factor[n]);
      }
    }
  }

  // True if every query is a key: packed keys are then queries too.
  bool queries_are_keys() const { return head.itself && keys.count == head.nkeys; }

  // Returns the panel of a block of queries. Without the keys' own, the queries are staged too.
  const float* pack_queries(const QueryBlock& b) {
    if (queries_are_keys()) return key_panels + panel_at(b.token[0] / kTile);
    const int64_t width = staging_width(p.head_dim);
    stage(head.w, p.dtype, p.head_dim, b.token, b.count, nullptr, width, staging);
    pack_panel<T>(staging, width, p.head_dim, b.count, query_panel);
    return query_panel;
  }

  // True if every tile has all of its pairs, both ways and without factors.
  bool has_all_pairs() const {
    return head.itself && keys.count > 1 && hides_none(p.mask) && !p.dropout && !p.threshold;
  }

  // True if half norms may shift the scores of pairs, without maxima.
  bool norms_serve(const HalfNormRange& extent) const { return extent.safe(safe_height()) && p.scale > 0; }

  // True if tiles may serve their rows and their columns, without maxima.
  bool pairs_allowed(const HalfNormRange& extent) const { return has_all_pairs() && norms_serve(extent); }

  // The largest h with which scores are shifted by their bound. In fp32 a weight that is all of its row is exactly 1
  // only if the maximum is subtracted. Only then is the row's out equal to its token, on which a range's delta depends.
  float safe_height() const { return p.range && p.dtype == Dtype::f32 ? kSafeHeightOfRange : kSafeHeight; }

  int64_t panel_at(int block) const { return block * panel_size<T>(p.head_dim); }
  int64_t rows_at(int block) const { return static_cast<int64_t>(block) * kTile / T::kPair * row_width; }

  // Adds to `ahead` the tensor that this head writes and those that the next one reads.
  template <int kCount>
  void fetch_ahead(const MssaView& result, MssaView MssaHead::* const (&read)[kCount]) {
    ahead.add(result, head.seqlen, p.head_dim, p.result);
    for (int n = 0; n < kCount && head.next != nullptr; ++n) {
      ahead.add(head.next->*read[n], head.next->seqlen, p.head_dim, p.dtype);
    }
    const int64_t blocks = (head.nkeys + kTile - 1) / kTile;
    ahead.share_among(blocks * (blocks + 1) / 2 * kFetches<T>);  // a causal head has so many products
  }

  // Calls body(block) for every block of queries of this part. The body fills in the shifts.
  template <class Body>
  void for_each_query_block(bool padded_only, const Body& body) {
    QueryBlock b;
    int index = 0;
    for (int64_t t = 0; t < head.seqlen;) {
      b.count = 0;
      for (; t < head.seqlen && b.count < kTile; ++t) {
        if (!(padded_only && KeyList::is_key(head, t))) b.token[b.count++] = static_cast<int32_t>(t);
      }
      if (b.count == 0 || !owns_block(index++, part, parts)) continue;
      find_bounds(b);
      body(b);
    }
  }

  void find_bounds(QueryBlock& b) const {
    b.any = {keys.count, 0};
    b.all = {0, keys.count};
    const int offset = static_cast<int>(head.query_start - head.key_start);  // 0 of the same tokens
    for (int r = 0; r < kTile; ++r) {
      if (r >= b.count) b.token[r] = b.token[0];
      const int query = b.token[r] + offset;
      const Span seen = keys_of(p.mask, {query, query + 1}, static_cast<int>(head.nkeys));
      const int first = b.first[r] = keys.rank[seen.first];
      const int stop = b.stop[r] = seen.stop > 0 ? keys.rank[seen.stop] : 0;  // all keys may follow the query
      b.any = {first < b.any.first ? first : b.any.first, stop > b.any.stop ? stop : b.any.stop};
      b.all = {first > b.all.first ? first : b.all.first, stop < b.all.stop ? stop : b.all.stop};
    }
    b.tiles = tiles_of(b.any, kTile);
  }

  // The scores of `rows` queries and of the keys of block j.
  Scores scores(const float* queries, int rows, int j, int columns) const {
    Scores s = {};
    s.query_panel = queries;
    s.key_panel = key_panels + panel_at(j);
    s.words = words;
    s.rows = rows;
    s.columns = columns;
    s.factor = score_factor;
    s.huge = huge;
    s.column_mass = masses + j * kTile;
    return s;
  }

  Scores row_scores(const QueryBlock& b, const float* queries, int j) const {
    Scores s = scores(queries, b.count, j, b.columns(j));
    s.row_shift = b.shifted ? b.shift : nullptr;
    s.row_power = b.powered ? b.power : nullptr;
    // Mask padding too. Its score is 0, and all other scores of the row may be so far below 0 that its weight would be
    // infinite. Infinity times a mass of 0 is NaN.
    if (b.cuts(j)) {
      s.first = b.first;
      s.stop = b.stop;
      s.start = j * kTile;
    }
    return s;
  }

  // Calls body(i, j) for every pair of blocks, including (i, i). The last block, which may be short, is on the side of
  // the rows: tiles compute whole vectors of columns, but rows one by one.
  template <class Body>
  void for_each_pair(const Body& body) const {
    for (int i = 0; i < keys.blocks; ++i) {
      for (int j = 0; j <= i; ++j) body(i, j);
    }
  }

  Scores pair_scores(int i, int j) const {
    Scores s = scores(key_panels + panel_at(i), in_block(keys.count, i), j, in_block(keys.count, j));
    s.row_power = half_norms + i * kTile;
    s.column_power = half_norms + j * kTile;
    s.row_mass = masses + i * kTile;
    s.symmetric = i == j;
    return s;
  }

  // The largest h up to each key bounds every score that a causal row has.
  void find_bounds_of_keys() {
    for (int n = 0; n < keys.count; ++n) {
      running_max[n] = n > 0 && running_max[n - 1] > half_norms[n] ? running_max[n - 1] : half_norms[n];
    }
  }

  // Finds the shifts of a block. Rows whose bound is too loose take the maximum of their scores; the others keep their
  // bits.
  void find_shifts(QueryBlock& b, const float* queries) const {
    if (!bound_scores(b)) shift_by_maxima(b, queries);
  }

  // Shifts the rows whose shift is NaN by the maximum of their scores.
  void shift_by_maxima(QueryBlock& b, const float* queries) const {
    alignas(64) float maxima[kTile * kLanes];
    for (int n = 0; n < kTile * kLanes; ++n) maxima[n] = -INFINITY;
    for (int j = b.tiles.first; j < b.tiles.stop; ++j) update_maxima<T>(row_scores(b, queries, j), maxima);
    for (int r = 0; r < kTile; ++r) {
      if (b.shift[r] == b.shift[r]) continue;
      b.shift[r] = b.has_keys(r) ? max(load(maxima + r * kLanes)) : kNoKeys;
      b.power[r] = 0.0f;
    }
    b.shifted = true;
  }

  // Every key counts once, padding of the last tile not at all.
  void unit_masses() {
    for (int n = 0; n < keys.blocks * kTile; ++n) masses[n] = n < keys.count ? 1.0f : 0.0f;
  }
  // 2^(h - largest h), powers of two.
  void pair_masses(float largest) {
    for (int n = 0; n < keys.blocks * kTile; n += kLanes) store(masses + n, exp2(load(half_norms + n) - largest));
    for (int n = keys.count; n < keys.blocks * kTile; ++n) masses[n] = 0.0f;
  }

 private:
  // Takes from the exponents of each row's weights a bound of its scores; shift NaN: there is none. True if all have
  // one.
  bool bound_scores(QueryBlock& b) const {
    bool bounded = true;
    b.powered = false;
    for (int r = 0; r < kTile; ++r) {
      const float bound = b.stop[r] > 0 ? running_max[b.stop[r] - 1] : 0.0f;
      bool safe = p.scale > 0 && keys.count > 1 && bound <= safe_height() && (!p.threshold || p.level >= kMinLevel);
      float own = 0.0f;
      if (head.itself) {
        own = half_norms[keys.rank[b.token[r]]];
        // The row's own key bounds its sum. One key alone has weight 1 exactly, and its score is the lse.
        const bool sees_itself = KeyList::is_key(head, b.token[r]) && !may_be_empty(p.mask);
        safe = safe && sees_itself && bound - own <= kSafeSpread;
      } else if (safe && r < b.count) {  // pack_queries() staged the rows; attend() tells if a sum is too small
        const int64_t width = staging_width(p.head_dim);
        own = half_norm(staging + r * width, width, score_factor);
        safe = own <= safe_height() && b.stop[r] - b.first[r] > 1;
      }
      b.power[r] = safe ? own + bound : 0.0f;
      b.shift[r] = safe ? 0.0f : NAN;
      b.powered = b.powered || safe;
      bounded = bounded && safe;
    }
    b.shifted = !bounded;
    return bounded;
  }
};

}  // namespace
