// Shared by the kernels of token statistics: sums over the tokens and channels of a tile, the softmax over heads, and
// dropout.
#pragma once

#include <type_traits>

#include "../../common/cpu/philox.h"
#include "tokens.h"

namespace {
namespace tssa {

constexpr float kFullFloor = 1e-24f, kCausalFloor = 1e-12f, kMassFloor = 1e-8f;

// Lane n is the sum of the lanes of v[n]. Overwrites v.
CRATE_INLINE Vf sum_each(Vf (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const Vi second = (iota() & half) != 0;
#pragma GCC unroll 8
    for (int r = 0; r < half; ++r) {
      v[r] = select(second, v[r + half], v[r]) + exchange(select(second, v[r], v[r + half]), half);
    }
  }
  return v[0];
}

// 1 for tokens that enter the sums, 0 for padded ones and beyond the last.
CRATE_INLINE Vf key_weights(const TssaSequence& s, int64_t first, int count) {
  Vf key_weight = select(iota() < count, splat(1.0f), Vf{});
  if (s.key_mask.data != nullptr) {
    for (int n = 0; n < count; ++n) key_weight[n] = *s.key_mask.at(0, first + n) != 0 ? 1.0f : 0.0f;
  }
  return key_weight;
}

// Marks the tile's tokens that have a key to sum over. In the full form these are all or none, in the causal
// form those from the first key on. Lanes beyond the last token are excluded: their q is 0, and 0 times an
// infinite temp is NaN.
CRATE_INLINE Vi has_key(const TssaSequence& s, int64_t first, int count) {
  const int64_t before = s.first_key - first;
  const Vi begun = iota() >= static_cast<int32_t>(before < 0 ? 0 : before > kLanes ? kLanes : before);
  return begun & (iota() < count);
}

// sums[d] += sum_n weight[n] w_nd^2 over n < kTokens.
template <int kTokens = kLanes, class T>
CRATE_INLINE void add_squares(const TssaCpuTensor<T>& w, int vectors, const float* weight, float* sums) {
  for_groups(vectors, [&](auto count, int v) CRATE_LAMBDA {
    constexpr int kCount = decltype(count)::value;
    Vf acc[kCount];
    load_group(sums + v * kLanes, acc);
    T* token = at(w, 0, v);
#pragma GCC unroll 4
    for (int n = 0; n < kTokens; ++n, step(w, token)) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Vf x = read(token + i * kLanes);
        acc[i] += x * x * weight[n];
      }
    }
    store_group(sums + v * kLanes, acc);
  });
}

// 1 / c by channel and, in `rest`, what its rounding left: w^2 times their sum is w^2 / c, exactly 1 where w^2 is c.
struct Reciprocals {
  float *inverse, *rest;

  void set(int64_t i, float c) const {
    inverse[i] = 1.0f / c;
    rest[i] = static_cast<float>(1.0 / c - inverse[i]);
  }
};

// sums[d] += sum_n weight[n] w_nd^2 / c_d. The ratio comes first: w^2 times a small weight underflows in channels whose
// c is still in range.
template <class T>
CRATE_INLINE void add_ratios(const TssaCpuTensor<T>& w, int vectors, const Reciprocals& c, const float* weight,
                             float* sums) {
  for_groups(vectors, [&](auto count, int v) CRATE_LAMBDA {
    constexpr int kCount = decltype(count)::value;
    Vf acc[kCount], f[kCount], rest[kCount];
    load_group(sums + v * kLanes, acc);
    load_group(c.inverse + v * kLanes, f);
    load_group(c.rest + v * kLanes, rest);
    T* token = at(w, 0, v);
#pragma GCC unroll 4
    for (int n = 0; n < kLanes; ++n, step(w, token)) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Vf x = read(token + i * kLanes);
        const Vf square = x * x;
        acc[i] += multiply_add(square * rest[i], square, f[i]) * weight[n];
      }
    }
    store_group(sums + v * kLanes, acc);
  });
}

// Lane n: sum_d w_nd^2 factor[d].
template <class T>
CRATE_INLINE Vf square_dots(const TssaCpuTensor<T>& w, int vectors, const float* factor) {
  Vf acc[kLanes] = {};
  for_groups(vectors, [&](auto count, int v) CRATE_LAMBDA {
    constexpr int kCount = decltype(count)::value;
    Vf f[kCount];
    load_group(factor + v * kLanes, f);
    T* token = at(w, 0, v);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n, step(w, token)) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Vf x = read(token + i * kLanes);
        acc[n] += x * f[i] * x;
      }
    }
  });
  return sum_each(acc);
}

// Lane n: sum_d w_nd^2 / c_d.
template <class T>
CRATE_INLINE Vf ratio_dots(const TssaCpuTensor<T>& w, int vectors, const Reciprocals& c) {
  Vf acc[kLanes] = {};
  for_groups(vectors, [&](auto count, int v) CRATE_LAMBDA {
    constexpr int kCount = decltype(count)::value;
    Vf f[kCount], rest[kCount];
    load_group(c.inverse + v * kLanes, f);
    load_group(c.rest + v * kLanes, rest);
    T* token = at(w, 0, v);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n, step(w, token)) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Vf x = read(token + i * kLanes);
        const Vf square = x * x;
        // The rest first: behind a sum that the other product rounds, it would be too late.
        acc[n] = multiply_add(multiply_add(acc[n], square, rest[i]), square, f[i]);
      }
    }
  });
  return sum_each(acc);
}

// e^x of x <= 0. What x log2(e) rounds off is a factor: a membership of 1e-30, times the squares of large tokens, may
// be all of a moment.
CRATE_INLINE Vf exponential(Vf x) {
  constexpr float kLog2E = 1.44269502f, kRest = 1.92596299e-8f;
  const Vf power = rounded(x * kLog2E), lost = multiply_add(-power, x, splat(kLog2E)) + x * kRest;
  return exp2(power) * (1.0f + select(x > -1000.0f, lost, Vf{}) * 0.69314718f);
}

// Softmax over heads of logits (nheads, kLanes), in place; 0 for tokens that `seen` leaves out.
CRATE_INLINE void softmax_over_heads(int nheads, Vi seen, float* logits) {
  Vf largest = load(logits), total = {};
  for (int h = 1; h < nheads; ++h) largest = max(largest, load(logits + h * kLanes));
  for (int h = 0; h < nheads; ++h) {
    const Vf e = exponential(load(logits + h * kLanes) - largest);
    total += e;
    store(logits + h * kLanes, e);
  }
  const Vf inverse = 1.0f / total;
  for (int h = 0; h < nheads; ++h) {
    store(logits + h * kLanes, select(seen, load(logits + h * kLanes) * inverse, Vf{}));
  }
}

// The gradient of the softmax over heads, (nheads, kLanes) each, in place: dlogit = Pi (dPi - sum_h Pi dPi). The mean
// is subtracted twice. If heads are nearly alike, or one has nearly all of a token, the first difference is mostly the
// rounding of two large numbers. The second sum has small terms, and is exact enough.
CRATE_INLINE void softmax_backward(int nheads, const float* membership, float* grad) {
  for (int time = 0; time < 2; ++time) {
    Vf mean = {};
    for (int h = 0; h < nheads; ++h) mean += load(membership + h * kLanes) * load(grad + h * kLanes);
    for (int h = 0; h < nheads; ++h) store(grad + h * kLanes, load(grad + h * kLanes) - mean);
  }
  for (int h = 0; h < nheads; ++h) {
    store(grad + h * kLanes, load(membership + h * kLanes) * load(grad + h * kLanes));
  }
}

// The dropout factors of one head's row, for p.width() channels.
void dropout_row(const TssaCpuProblem& p, uint32_t head, int64_t row, float* factor) {
  alignas(64) int32_t channel[16];
  alignas(64) uint32_t word[16];
  for (int64_t d = 0; d < p.width(); d += 16) {
    for (int n = 0; n < 16; ++n) channel[n] = static_cast<int32_t>(d) + n;
    philox_word0(p.seed, channel, static_cast<uint32_t>(row), head, 16, word);
    for (int n = 0; n < 16; ++n) factor[d + n] = word[n] >= p.keep_from ? p.keep_factor : 0.0f;
  }
}

// The same for the tokens of a tile.
CRATE_INLINE void dropout_rows(const TssaCpuProblem& p, uint32_t head, int64_t first, const Floats& factor) {
  for (int n = 0; n < kLanes; ++n) dropout_row(p, head, first + n, at(factor, n, 0));
}

// sums = parts[0] + parts[1] + ..., `size` numbers each, a multiple of 16. In fp64: of thousands of parts, in fp32 most
// of a result's error.
template <class Sum>
CRATE_INLINE void add_parts(const float* parts, int64_t count, int64_t size, Sum* sums) {
  constexpr int kSome = 16;
  for (int64_t first = 0; first < size; first += kSome) {
    double total[kSome] = {};
    for (int64_t part = 0; part < count; ++part) {
      for (int i = 0; i < kSome; ++i) total[i] += parts[part * size + first + i];
    }
    for (int i = 0; i < kSome; ++i) sums[first + i] = static_cast<Sum>(total[i]);
  }
}

// sums = the sum of w^2 over a chunk's keys.
CRATE_INLINE void sum_squares(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory,
                              float* sums) {
  const Staging staging(p, memory);
  memset(sums, 0, p.row_size() * sizeof(float));
  for_tiles(s, chunk, [&](int64_t first, int count) {
    alignas(64) float key_weight[kLanes];
    store(key_weight, key_weights(s, first, count));
    with_tile(p, {s.w, {}, {}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      // Few tokens at a time, all heads of them: nearly in memory order, which processors foresee. bf16 from memory
      // took a third longer head by head.
      constexpr int kTokens = 4;
      for (int n = 0; n < kLanes; n += kTokens) {
        auto tokens = tile.w;
        tokens.data += n * tokens.token;
        for (int h = 0; h < p.nheads; ++h) {
          add_squares<kTokens>(tokens.of_head(h), vectors_of(p), key_weight + n, sums + h * p.width());
        }
      }
    });
  });
}

// Loads the membership of a tile, and its part that enters the sums.
CRATE_INLINE void load_members(const TssaCpuProblem& p, const TssaSequence& s, int64_t first, int count, Vf key_weight,
                               float* members, float* counted) {
  for (int h = 0; h < p.nheads; ++h) {
    const Vf pi = load_some(s.membership.at(h, first), count);
    store(members + h * kLanes, pi);
    if (counted != nullptr) store(counted + h * kLanes, pi * key_weight);
  }
}

}  // namespace tssa
}  // namespace
