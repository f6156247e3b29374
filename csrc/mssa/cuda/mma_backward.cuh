// The backward of subspace attention on tensor cores: one accumulator, no atomics, bitwise deterministic.
//
// A warp owns rows j of w, as keys and as queries at once, and walks over tiles of rows i. dout is the gradient of out,
// L is lse, and shift = sum_d dout out - dlse. One tile of scores is symmetric and serves both directions:
//
//     P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
//     A_ij = scale (P_ij (dout_i.w_j - shift_i) + P_ji (dout_j.w_i - shift_j))
//     dw_j = sum_i P_ij dout_i + A_ij w_i
//
// In fp16, P and A are raised before they are rounded: mma_raise.cuh.
//
// Five products per tile, all with the warp's own rows or their weights on the left: warps exchange no data. Off the
// causal diagonal only one direction exists: four products after it, three before it.
#pragma once

#include "mma_raise.cuh"

namespace crate_kernels::mssa {

// The sums that a walk over the tiles adds: P dout (of selected weights, if `select`), A w, and the term dout.w of A.
struct Terms {
  bool values, scores, products, select;
};

// Roles of the owned rows for a tile: keys, queries, or both.
struct Roles {
  bool key, query, masked;
};

// One tile of rows i in shared memory. With `select`, lse is the largest score, and shift the level of the weights.
template <class T>
struct RowTile {
  T *w, *dout;         // (count, DIM)
  float *lse, *shift;  // (count,)
};

// Returns L, or inf for a row without keys: all its weights are then 0.
CRATE_DEVICE float base_of(float lse) {
  return lse == -INFINITY ? INFINITY : lse;
}

template <class T, int DIM, int ROWS16, bool IN_REGISTERS>
struct Gradient {
  float acc[ROWS16][DIM / 8][4] = {};  // (16 ROWS16, DIM) per warp: dw
  Own<T, DIM, ROWS16, IN_REGISTERS> w;
  Own<T, DIM, ROWS16, false> dout;          // read by one product, w by two: kept too, it leaves too few registers
  float base[ROWS16][2], shift[ROWS16][2];  // (16 ROWS16,) per warp
  uint32_t is_key = ~0u;                    // bit 2 m + half: the row may be a key

  // s += own rows of w . the 16 rows of a tile. BOTH: t += own rows of dout . them, which are then read once.
  template <bool BOTH>
  CRATE_DEVICE void scores(float (&s)[ROWS16][2][4], float (&t)[ROWS16][2][4], const T* tile) const {
#pragma unroll(IN_REGISTERS ? DIM / 16 : 4)
    for (int k = 0; k < DIM / 16; ++k) {
      uint32_t b[2][2];  // (16, 16): 16 channels of the tile's rows
      right_transposed<DIM>(b, tile, k);
      unroll<ROWS16>([&](int m) {
        uint32_t a[4];  // (16, 16): the same channels of own rows
        w.get(a, m, k);
        add_pair<T>(s[m][0], s[m][1], a, b);
        if (!BOTH) return;
        dout.get(a, m, k);
        add_pair<T>(t[m][0], t[m][1], a, b);
      });
    }
  }

  CRATE_DEVICE void multiply(float factor) {
    unroll<ROWS16, DIM / 8>([&](int m, int n) { unroll<4>([&](int e) { acc[m][n][e] *= factor; }); });
  }

  // Adds the terms of 16 rows i from `other` on to the owned rows, the first of which is `row`.
  CRATE_DEVICE void add_rows(const Problem& call, const Head& head, const uint8_t* mask, uint64_t seed,
                             const RowTile<T>& tile, int row, int other, Terms terms, Roles roles) {
    const int group = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    // (16 ROWS16, 16) per warp: w_j.w_i, w_j.dout_i, dout_j.w_i
    float s[ROWS16][2][4] = {}, dp[ROWS16][2][4] = {}, dt[ROWS16][2][4] = {};
    if (terms.products && roles.query) {
      scores<true>(s, dt, tile.w);
    } else {
      scores<false>(s, dt, tile.w);
    }
    if (terms.products && roles.key) scores<false>(dp, dt, tile.dout);
    uint32_t p[ROWS16][4], a[ROWS16][4];  // (16 ROWS16, 16) per warp: P and A, rounded
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) {
      float as_key[2][4] = {}, as_query[2][4] = {};  // (16, 16) per warp: P_ij and P_ji
      if (roles.key) {
        unroll<8>([&](int i) {
          const float base = base_of(tile.lse[i / 4 * 8 + 2 * t + i % 2]);
          as_key[i / 4][i % 4] = weight(s[m][i / 4][i % 4], call.scale, base);
        });
      }
      if (roles.query) {
        unroll<8>([&](int i) { as_query[i / 4][i % 4] = weight(s[m][i / 4][i % 4], call.scale, base[m][i % 4 / 2]); });
      }
      if (roles.masked) {
        const uint32_t other_is_key = mask == nullptr ? ~0u : key_bits<16>(mask, other, head.length);
        unroll<8>([&](int i) {
          const int half = i % 4 / 2, o = other + i / 4 * 8 + 2 * t + i % 2, j = row + 16 * m + group + 8 * half;
          const bool there = o < head.length;
          if (!(there & sees(call.mask, o, j) & (is_key >> (2 * m + half)))) as_key[i / 4][i % 4] = 0.0f;
          if (!(there & sees(call.mask, j, o) & (other_is_key >> (i / 4 * 2 + i % 2)))) as_query[i / 4][i % 4] = 0.0f;
        });
      }
      float value[2][4];  // (16, 16) per warp
      unroll<8>([&](int i) {
        const float x = as_key[i / 4][i % 4];
        const float level = tile.shift[i / 4 * 8 + 2 * t + i % 2];
        value[i / 4][i % 4] = terms.select ? (x > level ? 1.0f : 0.0f) : x;
      });
      if (call.masking.seed != nullptr) {
        const uint32_t keys = kept_bits<16>(seed, call, head, row + 16 * m, other, true);
        const uint32_t queries = kept_bits<16>(seed, call, head, row + 16 * m, other, false);
        unroll<8>([&](int i) {
          const float key = keys >> i & 1 ? call.keep_factor : 0.0f, query = queries >> i & 1 ? call.keep_factor : 0.0f;
          value[i / 4][i % 4] *= key;
          // Round the product before subtracting the shift, which is rounded too.
          dp[m][i / 4][i % 4] = __fmul_rn(dp[m][i / 4][i % 4], key);
          dt[m][i / 4][i % 4] = __fmul_rn(dt[m][i / 4][i % 4], query);
        });
      }
      if constexpr (kRaises<T>) unroll<8>([&](int i) { value[i / 4][i % 4] *= raise(); });
      pack_left<T>(p[m], value[0], value[1]);
      const float scale = kRaises<T> ? call.scale * raise() : call.scale;
      unroll<8>([&](int i) {
        const float key = as_key[i / 4][i % 4] * (dp[m][i / 4][i % 4] - tile.shift[i / 4 * 8 + 2 * t + i % 2]);
        const float query = as_query[i / 4][i % 4] * (dt[m][i / 4][i % 4] - shift[m][i % 4 / 2]);
        dp[m][i / 4][i % 4] = (key + query) * scale;
      });
      pack_left<T>(a[m], dp[m][0], dp[m][1]);
    }
    if (terms.values && roles.key) mssa::add_rows<T, DIM>(acc, p, tile.dout);
    if (terms.scores) mssa::add_rows<T, DIM>(acc, a, tile.w);
  }
};

template <int DIM>
constexpr __device__ int64_t row_tile_bytes(int count) {
  return count * (2 * DIM * 2 + 8);
}

template <class T, int DIM>
CRATE_DEVICE RowTile<T> row_tile_at(unsigned char* stage, int count) {
  T *const w = reinterpret_cast<T*>(stage), *const dout = w + count * DIM;
  float* const lse = reinterpret_cast<float*>(dout + count * DIM);
  return {w, dout, lse, lse + count};
}

// Copies rows [first, first + count) of w, dout and their two numbers.
template <class T, int DIM>
CRATE_DEVICE void load_row_tile(const RowTile<T>& to, const Problem& call, const Head& head, const View<const T>& w,
                                const View<const T>& dout, bool select, int first, int count) {
  load_tile<T, DIM>(to.w, w, count, first, head.length, call.access);
  if (call.values) load_tile<T, DIM>(to.dout, dout, count, first, head.length, call.access);
  const float* const lse = select ? call.scratch.row_max : call.outputs.lse;
  const float* const shift = select ? call.scratch.select_level : call.scratch.delta;
  for (int n = threadIdx.x; n < count; n += blockDim.x) {
    const bool there = first + n < head.length;
    const int64_t at = head.row + (there ? first + n : 0);
    cp_async_4(to.lse + n, lse + at, there);
    cp_async_4(to.shift + n, shift + at, there);
  }
}

}  // namespace crate_kernels::mssa
