// A tile of keys in the forward of subspace attention on tensor cores. Each warp owns rows i:
//
//     out_i = sum_j exp(s_ij - m_i) w_j / l_i,    s_ij = scale w_i . w_j,    l_i = sum_j exp(s_ij - m_i),
//
// with the running maximum m of the online softmax (Milakov and Gimelshein; Dao, FlashAttention-2). Query, key and
// value are one matrix, so one tile in shared memory is read as keys and, transposed, as values: half the traffic and
// half the shared memory of attention with two matrices.
#pragma once

#include "mma_tile.cuh"

namespace crate_kernels::mssa {

// `statistics` and `select` are the two passes of phi = "threshold".
enum class Pass { online, statistics, select };

// State of a warp's 16 * ROWS16 rows. A lane has two rows of every 16, and its own columns' share of l.
template <class T, int DIM, int ROWS16>
struct RowState {
  float acc[ROWS16][DIM / 8][4] = {};             // (16 ROWS16, DIM) per warp
  float largest[ROWS16][2], sum[ROWS16][2] = {};  // (16 ROWS16,) per warp

  CRATE_DEVICE RowState() {
    unroll<ROWS16>([&](int m) { largest[m][0] = largest[m][1] = -INFINITY; });
  }

  CRATE_DEVICE void finish_sums() {
    unroll<ROWS16, 2>([&](int m, int half) { sum[m][half] = row_sum(sum[m][half]); });
  }
};

// The mask of a warp's rows: keys that a row may see, weights that dropout keeps.
struct RowMask {
  const uint8_t* key_mask;  // of this sequence
  uint64_t seed;
  float scale;  // magnitude; the left operand has the sign
  int length;   // of the keys
};

// Positions among the keys: of a warp's first row, and of a tile's first key.
struct TilePlace {
  int row, key;
};

template <int ROWS16, int COLUMNS>
CRATE_DEVICE void mask_scores(float (&s)[ROWS16][COLUMNS / 8][4], const Problem& call, const RowMask& mask,
                              TilePlace place) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  // Branch-free: masked tiles are rare, but in one, many columns are masked.
  uint32_t is_key = ~0u;
  if (mask.key_mask != nullptr) is_key = key_bits<COLUMNS>(mask.key_mask, place.key, mask.length);
  unroll<ROWS16, 2>([&](int m, int half) {
    // Positions from the lane's first key on.
    const int first = place.key + 2 * t, length = mask.length - first, row = place.row + 16 * m + g + 8 * half - first;
    unroll<COLUMNS / 8, 2>([&](int n, int e) {
      const int key = 8 * n + e;
      const bool seen = (key < length) & sees(call.mask, row, key) & (is_key >> (2 * n + e));
      s[m][n][2 * half + e] = seen ? s[m][n][2 * half + e] : -INFINITY;
    });
  });
}

// Sign of the scale, moved into the left operand: its sign bits are flipped, or, for 0, all bits cleared.
struct Sign {
  uint32_t mask, flip;

  explicit CRATE_DEVICE Sign(float scale) : mask(scale == 0.0f ? 0 : ~0u), flip(scale < 0.0f ? 0x80008000u : 0) {}

  CRATE_DEVICE void apply(uint32_t (&a)[4]) const {
    unroll<4>([&](int i) { a[i] = (a[i] & mask) ^ flip; });
  }
};

// Adds COLUMNS keys to a warp's rows.
template <int COLUMNS, class T, int DIM, int ROWS16, bool IN_REGISTERS>
CRATE_DEVICE void attend_tile(RowState<T, DIM, ROWS16>& state, const Own<T, DIM, ROWS16, IN_REGISTERS>& own,
                              const T* tile, const Problem& call, const Head& head, const RowMask& mask,
                              const Sign& sign, TilePlace place, bool masked, Pass pass) {
  float s[ROWS16][COLUMNS / 8][4] = {};  // (16 ROWS16, COLUMNS) per warp
#pragma unroll(IN_REGISTERS ? DIM / 16 : 4)
  for (int k = 0; k < DIM / 16; ++k) {
    uint32_t a[ROWS16][4];  // (16 ROWS16, 16): 16 channels of own rows
    unroll<ROWS16>([&](int m) {
      own.get(a[m], m, k);
      sign.apply(a[m]);
    });
    unroll<COLUMNS / 16>([&](int n) {
      uint32_t b[2][2];  // (16, 16): the same channels of 16 keys
      right_transposed<DIM>(b, tile + n * 16 * DIM, k);
      unroll<ROWS16>([&](int m) { add_pair<T>(s[m][2 * n], s[m][2 * n + 1], a[m], b); });
    });
  }
  if (masked) mask_scores<ROWS16, COLUMNS>(s, call, mask, place);
  unroll<ROWS16, 2>([&](int m, int half) {
    const float before = state.largest[m][half];
    float top = before;
    if (pass != Pass::select) {
      float maximum = -INFINITY;
      unroll<COLUMNS / 8>([&](int n) { maximum = fmaxf(maximum, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1])); });
      top = fmaxf(before, row_max(maximum) * mask.scale);
      state.largest[m][half] = top;
    }
    // Without a key so far, any finite base makes the weights 0 instead of NaN.
    const float base = top == -INFINITY ? 0.0f : top;
    if (pass != Pass::select) {
      const float shrink = weight(before, 1.0f, base);
      state.sum[m][half] *= shrink;
      unroll<DIM / 8, 2>([&](int n, int e) { state.acc[m][n][2 * half + e] *= shrink; });
    }
    const float level = call.threshold * state.sum[m][half];
    unroll<COLUMNS / 8, 2>([&](int n, int e) {
      float& score = s[m][n][2 * half + e];
      const float p = weight(score, mask.scale, base);
      // Compare with threshold * sum: a division could round an equal probability above the threshold.
      score = pass == Pass::select ? (p > level ? 1.0f : 0.0f) : p;
      if (pass != Pass::select) state.sum[m][half] += p;
    });
  });
  if (pass == Pass::statistics) return;
  if (call.masking.seed != nullptr) {
    unroll<ROWS16>([&](int m) {
      const uint32_t bits = kept_bits<COLUMNS>(mask.seed, call, head, place.row + 16 * m, place.key, false);
      unroll<COLUMNS / 2>([&](int i) {
        if (!(bits >> i & 1)) s[m][i / 4][i % 4] = 0.0f;
      });
    });
  }
  unroll<COLUMNS / 16>([&](int n) {
    uint32_t p[ROWS16][4];  // (16 ROWS16, 16): weights of 16 keys
    unroll<ROWS16>([&](int m) { pack_left<T>(p[m], s[m][2 * n], s[m][2 * n + 1]); });
    add_rows<T, DIM>(state.acc, p, tile + n * 16 * DIM);
  });
}

// Writes the statistics of a warp's rows.
template <class T, int DIM, int ROWS16>
CRATE_DEVICE void put_statistics(const RowState<T, DIM, ROWS16>& state, const Problem& call, const Head& head,
                                 int row) {
  const int lane = threadIdx.x % kWarp;
  unroll<ROWS16, 2>([&](int m, int half) {
    const int at = row + 16 * m + lane / 4 + 8 * half;
    if (lane % 4 == 0 && at < head.length) put_statistics(call, head, at, state.largest[m][half], state.sum[m][half]);
  });
}

// Writes out and lse of a warp's rows, of those from `from` on. `tile`, the warp's own, is scratch. Without a key, out
// is 0 and lse -inf.
template <class T, int DIM, int ROWS16>
CRATE_DEVICE void finish_rows(const RowState<T, DIM, ROWS16>& state, T* tile, const Problem& call, const Head& head,
                              int row, int from = 0) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
  unroll<ROWS16>([&](int m) {
    float factor[2];  // of the lane's two rows
    unroll<2>([&](int half) {
      const float sum = state.sum[m][half];
      const int at = row + 16 * m + lane / 4 + 8 * half;
      factor[half] = sum == 0.0f ? 0.0f : call.keep_factor * (call.select ? call.threshold : 1.0f / sum);
      if (lane % 4 == 0 && at < head.length && call.outputs.lse != nullptr && at >= from) {
        call.outputs.lse[head.row + at] = lse_of(state.largest[m][half], sum);
      }
    });
    round_rows<T, DIM>(tile + m * 16 * DIM, state.acc[m], factor[0], factor[1]);
  });
  __syncwarp();
  store_tile<T, DIM>(head.view<T>(call, call.outputs.out), tile, 16 * ROWS16, row, head.length, call.access,
                     max(from - row, 0));
}

}  // namespace crate_kernels::mssa
