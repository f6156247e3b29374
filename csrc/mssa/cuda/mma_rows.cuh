// A tile of keys in the forward of subspace attention on tensor cores. Each warp owns rows i:
//
//     out_i = sum_j exp(s_ij - m_i) w_j / l_i,    s_ij = scale w_i . w_j,    l_i = sum_j exp(s_ij - m_i),
//
// with the running maximum m of the online softmax (Milakov and Gimelshein; Dao, FlashAttention-2). Query, key and
// value are one matrix, so one tile in shared memory is read as keys and, transposed, as values: half the traffic and
// half the shared memory of attention with two matrices.
#pragma once

#include "mma_call.cuh"

namespace crate_kernels::mssa {

// `statistics` and `select` are the two passes of phi = "threshold".
enum class Pass { online, statistics, select };

// State of a warp's 16 * ROWS16 rows. A lane has two rows of every 16, and its own columns' share of l.
template <class T, int DIM, int ROWS16>
struct RowState {
  float acc[ROWS16][DIM / 8][4] = {};
  float largest[ROWS16][2], sum[ROWS16][2] = {};

  CRATE_DEVICE RowState() {
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) largest[m][0] = largest[m][1] = -INFINITY;
  }

  CRATE_DEVICE void finish_sums() {
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = row_sum(sum[m][half]);
    }
  }
};

// The mask of a warp's rows: keys that a row may see, weights that dropout keeps.
struct RowMask {
  const bool* keep;  // of this sequence
  uint64_t seed;
  float scale;  // magnitude; the left operand has the sign
  int length;   // of the keys
};

// Positions among the keys: of a warp's first row, and of a tile's first key.
struct Place {
  int row, key;
};

template <int ROWS16, int COLUMNS>
CRATE_DEVICE void mask_scores(float (&s)[ROWS16][COLUMNS / 8][4], const Problem& call, const RowMask& mask,
                              Place place) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  // Branch-free: masked tiles are rare, but in one, many columns are masked.
  uint32_t kept_keys = ~0u;
  if (mask.keep != nullptr) kept_keys = key_bits<COLUMNS>(mask.keep, place.key, mask.length);
#pragma unroll
  for (int m = 0; m < ROWS16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 16 * m + g + 8 * half;
      const int stop = (call.causal ? min(mask.length, row + 1) : mask.length) - place.key - 2 * t;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool seen = (8 * n + e < stop) & (kept_keys >> (2 * n + e));
          s[m][n][2 * half + e] = seen ? s[m][n][2 * half + e] : -INFINITY;
        }
      }
    }
  }
}

// Sign of the scale, moved into the left operand: its sign bits are flipped, or, for 0, all bits cleared.
struct Sign {
  uint32_t keep, flip;

  explicit CRATE_DEVICE Sign(float scale) : keep(scale == 0.0f ? 0 : ~0u), flip(scale < 0.0f ? 0x80008000u : 0) {}

  CRATE_DEVICE void apply(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = (a[i] & keep) ^ flip;
  }
};

// Adds COLUMNS keys to a warp's rows.
template <int COLUMNS, class T, int DIM, int ROWS16, bool HELD>
CRATE_DEVICE void attend_tile(RowState<T, DIM, ROWS16>& state, const Own<T, DIM, ROWS16, HELD>& own, const T* tile,
                              const Problem& call, const Head& head, const RowMask& mask, const Sign& sign, Place place,
                              bool masked, Pass pass) {
  float s[ROWS16][COLUMNS / 8][4] = {};
#pragma unroll(HELD ? DIM / 16 : 4)
  for (int k = 0; k < DIM / 16; ++k) {
    uint32_t a[ROWS16][4];
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) {
      own.get(a[m], m, k);
      sign.apply(a[m]);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      uint32_t b[2][2];
      right_transposed<DIM>(b, tile + n * 16 * DIM, k);
#pragma unroll
      for (int m = 0; m < ROWS16; ++m) {
        mma_16816<T>(s[m][2 * n], a[m], b[0]);
        mma_16816<T>(s[m][2 * n + 1], a[m], b[1]);
      }
    }
  }
  if (masked) mask_scores<ROWS16, COLUMNS>(s, call, mask, place);
#pragma unroll
  for (int m = 0; m < ROWS16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = state.largest[m][half];
      float top = before;
      if (pass != Pass::select) {
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top = fmaxf(before, row_max(most) * mask.scale);
        state.largest[m][half] = top;
      }
      // Without a key so far, any finite base makes the weights 0 instead of NaN.
      const float base = top == -INFINITY ? 0.0f : top;
      if (pass != Pass::select) {
        const float shrink = weight(before, 1.0f, base);
        state.sum[m][half] *= shrink;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n) {
          state.acc[m][n][2 * half] *= shrink;
          state.acc[m][n][2 * half + 1] *= shrink;
        }
      }
      const float level = call.threshold * state.sum[m][half];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float p = weight(s[m][n][e], mask.scale, base);
          // Compare with threshold * sum: a division could round an equal probability above the threshold.
          s[m][n][e] = pass == Pass::select ? (p > level ? 1.0f : 0.0f) : p;
          if (pass != Pass::select) state.sum[m][half] += p;
        }
      }
    }
  }
  if (pass == Pass::statistics) return;
  if (call.seed != nullptr) {
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) {
      const uint32_t bits = kept_bits<COLUMNS>(mask.seed, call, head, place.row + 16 * m, place.key, false);
#pragma unroll
      for (int i = 0; i < COLUMNS / 2; ++i) {
        if (!(bits >> i & 1)) s[m][i / 4][i % 4] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < COLUMNS / 16; ++n) {
    uint32_t p[ROWS16][4];
#pragma unroll
    for (int m = 0; m < ROWS16; ++m) pack_left<T>(p[m], s[m][2 * n], s[m][2 * n + 1]);
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
      uint32_t b[2][2];
      right<DIM>(b, tile + n * 16 * DIM, k);
#pragma unroll
      for (int m = 0; m < ROWS16; ++m) add_product<T, DIM>(state.acc[m], p[m], b, k);
    }
  }
}

// Writes out and lse of a warp's rows. `tile`, the warp's own, is scratch. Without a key, out is 0 and lse -inf.
template <class T, int DIM, int ROWS16>
CRATE_DEVICE void finish_rows(const RowState<T, DIM, ROWS16>& state, T* tile, const Problem& call, const Head& head,
                              int row) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < ROWS16; ++m) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = state.sum[m][half];
      const int at = row + 16 * m + lane / 4 + 8 * half;
      factor[half] = sum == 0.0f ? 0.0f : call.keep_factor * (call.select ? call.threshold : 1.0f / sum);
      if (lane % 4 == 0 && at < head.length && call.lse != nullptr) {
        call.lse[head.row + at] = sum == 0.0f ? -INFINITY : state.largest[m][half] + logf(sum);
      }
    }
    round_rows<T, DIM>(tile + m * 16 * DIM, state.acc[m], factor[0], factor[1]);
  }
  __syncwarp();
  store_tile<T, DIM>(head.view<T>(call, call.out), tile, 16 * ROWS16, row, head.length, call.access);
}

}  // namespace crate_kernels::mssa
