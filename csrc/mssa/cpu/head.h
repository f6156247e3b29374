// State of one head, for the forward and the backward: its keys, their packing, softmax shifts.
#pragma once

#include "../../common/cpu/philox.h"
#include "../../common/cpu/scratch.h"
#include "kernels.h"
#include "scores.h"

namespace {

using crate_kernels::MssaHead;
using crate_kernels::MssaProblem;
using crate_kernels::MssaView;

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Largest spread of |w_i|^2 scale / 2, in bits, that is safe without a maximum: 60 nats. Beyond about 80, 1 / l
// overflows.
constexpr float kSafeSpread = 86.5f;
// Largest h, in bits, for the forms without maxima. Scores of this size are rounded to 2^-10. From 2^29 on, the
// rounding makes weights of nearly equal tokens overflow.
constexpr float kSafeHeight = 4096.0f;
// The shift of a row without keys: its weights become 0.
constexpr float kNoKeys = 1e30f;

CRATE_INLINE char* element(const MssaView& view, int64_t token, Dtype dtype) {
  return static_cast<char*>(view.data) + token * view.token_stride * crate_kernels::itemsize(dtype);
}

// The tokens that are keys, numbered in order; padded ones leave no gap.
struct Keys {
  int count = 0;
  int blocks = 0;
  int32_t* token;  // token of each key; zero in the padding to whole tiles
  int32_t* rank;   // number of keys before each token

  void find(const MssaHead& head) {
    for (int64_t t = 0; t < head.seqlen; ++t) {
      rank[t] = count;
      if (kept(head, t)) token[count++] = static_cast<int32_t>(t);
    }
    blocks = (count + kTile - 1) / kTile;
    for (int n = count; n < blocks * kTile; ++n) token[n] = 0;
  }
  static bool kept(const MssaHead& head, int64_t t) { return head.keep == nullptr || head.keep[t]; }
};

// Row width of the staging buffer: whole vectors, and whole words of two elements.
CRATE_INLINE int64_t staging_width(int head_dim) {
  return round_up(head_dim, 2 * kLanes);
}

// Reads up to kTile tokens of a view as rows of `width` floats, times factor[n] if factor is given. The rows after
// them, to whole vectors of tokens, are zero.
CRATE_INLINE void stage(const MssaView& view, Dtype dtype, int head_dim, const int32_t* token, int count,
                        const float* factor, int64_t width, float* rows) {
  // Copies a known length in vectors: one memcpy per row took 5% of a forward of 197 tokens.
  const bool whole_vectors = dtype == Dtype::f32 && view.dim_stride == 1 && head_dim % kLanes == 0;
  for (int n = 0; n < count; ++n) {
    float* const row = rows + n * width;
    const char* const source = element(view, token[n], dtype);
    const float by = factor == nullptr ? 1.0f : factor[n];
    if (whole_vectors) {
      const float* const from = reinterpret_cast<const float*>(source);
      for (int d = 0; d < head_dim; d += kLanes) store(row + d, load(from + d) * by);
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

// h = S_ii / 2 in bits, rounded to an integer. Any value near S_ii / 2 serves. Sums of integers and products with 2^h
// are exact, so neither the shifts of the scores nor the masses of the values are rounded.
CRATE_INLINE float half_norm(const float* row, int64_t width, float factor) {
  const float magic = 12582912.0f;
  const float h = 0.5f * factor * row_dot(row, row, width);
  return (h + magic) - magic;
}

// True if the head needs no row maxima: with scale > 0, S_ij <= (S_ii + S_jj) / 2, so 2^(S_ij - h_i - h_j) is at most 2
// for h near S_ii / 2, and the row sum is at least 2^(h_i - max h) / 2.
CRATE_INLINE bool safe_spread(const float* half_norm, int count, float* largest) {
  float most = -INFINITY, least = INFINITY;
  for (int n = 0; n < count; ++n) {
    most = half_norm[n] > most ? half_norm[n] : most;
    least = half_norm[n] < least ? half_norm[n] : least;
  }
  *largest = most;
  return most - least <= kSafeSpread && most <= kSafeHeight;
}

// A block of queries, the number of keys that each sees, and the shifts of their scores.
struct Block {
  int count;
  int most, least;  // of limit
  int32_t token[kTile], limit[kTile];
  alignas(64) float shift[kTile];

  int columns(int j) const { return most - j * kTile < kTile ? most - j * kTile : kTile; }
};

// State of one head in either direction; `T` packs its words.
template <class T>
class Head {
 public:
  Head(const MssaProblem& p, const MssaHead& head, int part, int parts)
      : p_(p),
        head_(head),
        part_(part),
        parts_(parts),
        width_(padded_dim(p.head_dim)),
        words_(channel_words<T>(p.head_dim)),
        factor_(static_cast<float>(p.scale * kLog2e)) {}

 protected:
  // True if tiles may serve their rows and their columns.
  bool pairs_allowed() const { return p_.scale > 0 && !p_.causal && !p_.dropout && !p_.threshold; }

  int64_t panel_at(int block) const { return block * panel_size<T>(p_.head_dim); }
  int64_t rows_at(int block) const { return static_cast<int64_t>(block) * kTile / T::kPair * width_; }

  // Calls body(block) for every block of queries of this part. The body fills in the shifts.
  template <class Body>
  void for_each_query_block(bool padded_only, const Body& body) {
    Block b;
    int index = 0;
    for (int64_t t = 0; t < head_.seqlen;) {
      b.count = 0;
      for (; t < head_.seqlen && b.count < kTile; ++t) {
        if (!(padded_only && Keys::kept(head_, t))) b.token[b.count++] = static_cast<int32_t>(t);
      }
      if (b.count == 0 || !owns_block(index++, part_, parts_)) continue;
      b.most = 0;
      b.least = keys_.count;
      for (int r = 0; r < kTile; ++r) {
        if (r >= b.count) b.token[r] = b.token[0];
        b.limit[r] = p_.causal ? keys_.rank[b.token[r]] + Keys::kept(head_, b.token[r]) : keys_.count;
        b.most = b.limit[r] > b.most ? b.limit[r] : b.most;
        b.least = b.limit[r] < b.least ? b.limit[r] : b.least;
      }
      body(b);
    }
  }

  // Returns the scores of tile j of a block. `limit` is memory that the result may point to.
  Scores row_scores(const Block& b, const float* queries, int j, int32_t* limit) const {
    Scores s = {};
    s.query_panel = queries;
    s.key_panel = key_panels_ + panel_at(j);
    s.words = words_;
    s.rows = b.count;
    s.columns = b.columns(j);
    s.factor = factor_;
    s.row_shift = b.shift;
    s.column_mass = mass_ + j * kTile;
    // Mask padding too. Its score is 0, and all other scores of the row may be so far below 0 that its weight would be
    // infinite. Infinity times a mass of 0 is NaN.
    if (b.least < (j + 1) * kTile) {
      for (int r = 0; r < kTile; ++r) limit[r] = b.limit[r] - j * kTile;
      s.limit = limit;
    }
    return s;
  }

  // Calls body(i, j) for every pair of blocks, including (i, i). The last block, which may be short, is on the side of
  // the rows: tiles compute whole vectors of columns, but rows one by one.
  template <class Body>
  void for_each_pair(const Body& body) const {
    for (int i = 0; i < keys_.blocks; ++i) {
      for (int j = 0; j <= i; ++j) body(i, j);
    }
  }

  Scores pair_scores(int i, int j) const {
    Scores s = {};
    s.query_panel = key_panels_ + panel_at(i);
    s.key_panel = key_panels_ + panel_at(j);
    s.words = words_;
    s.rows = in_block(keys_.count, i);
    s.columns = in_block(keys_.count, j);
    s.factor = factor_;
    s.row_shift = half_norm_ + i * kTile;
    s.column_shift = half_norm_ + j * kTile;
    s.column_mass = mass_ + j * kTile;
    s.row_mass = mass_ + i * kTile;
    s.symmetric = i == j;
    return s;
  }

  // Shift the rows whose shift is NaN by the maximum of their scores.
  void shift_by_maxima(Block& b, const float* queries) const {
    alignas(64) float maxima[kTile * kLanes];
    for (int n = 0; n < kTile * kLanes; ++n) maxima[n] = -INFINITY;
    for (int j = 0; j * kTile < b.most; ++j) {
      int32_t limit[kTile];
      update_maxima<T>(row_scores(b, queries, j, limit), maxima);
    }
    for (int r = 0; r < kTile; ++r) {
      if (b.shift[r] == b.shift[r]) continue;
      b.shift[r] = r < b.count && b.limit[r] > 0 ? max(load(maxima + r * kLanes)) : kNoKeys;
    }
  }

  // Every key counts once, padding of the last tile not at all.
  void unit_masses() {
    for (int n = 0; n < keys_.blocks * kTile; ++n) mass_[n] = n < keys_.count ? 1.0f : 0.0f;
  }
  // 2^(h - largest h), powers of two.
  void pair_masses(float largest) {
    for (int n = 0; n < keys_.blocks * kTile; n += kLanes) store(mass_ + n, exp2(load(half_norm_ + n) - largest));
    for (int n = keys_.count; n < keys_.blocks * kTile; ++n) mass_[n] = 0.0f;
  }

  static void clear(const Sums& sums, int64_t count) {
    memset(sums.row, 0, count * kLanes * sizeof(float));
    memset(sums.column, 0, count * sizeof(float));
  }
  static float total_of(const Sums& sums, int64_t n) { return sum(load(sums.row + n * kLanes)) + sums.column[n]; }
  // Returns the destination of a pair's sums: partial sums of its rows; sums of its columns in `column`, for
  // add_columns.
  static Sums at(const Sums& sums, int i, float* column) {
    return {sums.row + static_cast<int64_t>(i) * kTile * kLanes, column};
  }
  // Sum the columns of a tile first, then add to the total. Adding each weight to the total would round the weight to
  // the total's precision: four times eager's error at 8192 tokens.
  static void add_columns(const Sums& sums, int j, const float* tile) {
    float* const total = sums.column + j * kTile;
    for (int n = 0; n < kTile; n += kLanes) store(total + n, load(total + n) + load(tile + n));
  }

  const MssaProblem& p_;
  const MssaHead& head_;
  const int part_, parts_;
  const int width_, words_;
  const float factor_;
  Keys keys_;
  float *key_panels_, *half_norm_, *mass_, *staging_;
};

// Dropout factors of a tile: rows of tokens against keys.
CRATE_INLINE void dropout_factors(const MssaProblem& p, const MssaHead& head, const int32_t* row_token, int rows,
                                  const int32_t* column_token, float* factors) {
  uint32_t words[kTile];
  for (int r = 0; r < rows; ++r) {
    philox_word0(p.seed, column_token, static_cast<uint32_t>(row_token[r]), head.counter, kTile, words);
    for (int c = 0; c < kTile; ++c) factors[r * kTile + c] = words[c] >= p.keep_from ? p.keep_factor : 0.0f;
  }
}

// The weights of the values: phi of the probabilities, times the dropout factors if any.
CRATE_INLINE void transform_weights(const MssaProblem& p, const float* dropout, int rows, float* weights) {
  for (int n = 0; n < rows * kTile; n += kLanes) {
    Vf weight = load(weights + n);
    if (p.threshold) weight = select(weight > p.level, splat(p.level), Vf{});
    if (dropout != nullptr) weight *= load(dropout + n);
    store(weights + n, weight);
  }
}

}  // namespace
