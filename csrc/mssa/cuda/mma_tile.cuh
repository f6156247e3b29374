// Tiles of tokens in shared memory, the tensor-core operands read from them, and the masks and weights of products.
//
// A tile is rows of DIM halves; channels beyond head_dim are 0. One tile is key and value at once: its rows are the
// right operand of w_i . w_j as stored, and of P w transposed.
#pragma once

#include "../../common/cuda/mma.cuh"
#include "head.cuh"

namespace crate_kernels::mssa {

constexpr int kHalves = 8;  // halves per chunk: the 16 bytes that one lane of ldmatrix addresses

constexpr __device__ int swizzle_bits(int dim) {
  int bits = 0;
  for (int chunks = dim / kHalves; bits < 3 && chunks % 2 == 0; chunks /= 2) ++bits;
  return bits;
}

// Place of a chunk of a row, in halves from the start of the tile. ldmatrix reads eight rows at once, and the banks are
// eight chunks wide. Rows with an even number of chunks would collide, so their chunks are permuted from row to row.
// The permutation repeats after eight rows.
template <int DIM>
constexpr __device__ __forceinline__ int tile_offset(int row, int chunk) {
  constexpr int kBits = swizzle_bits(DIM);
  return row * DIM + (chunk ^ ((row >> (3 - kBits)) & ((1 << kBits) - 1))) * kHalves;
}

// Copies rows [first, first + rows) into a tile asynchronously; rows from `length` on become zeros.
template <class T, int DIM>
CRATE_DEVICE void load_tile(T* tile, const View<const T>& from, int rows, int first, int length, const Access& access) {
  constexpr int kChunks = DIM / kHalves;
  const int count = rows * kChunks, step = static_cast<int>(blockDim.x);
  if (access.wide) {
#pragma unroll 4
    for (int n = threadIdx.x; n < count; n += step) {
      const int row = n / kChunks, chunk = n % kChunks;
      const bool present = first + row < length && chunk * kHalves < access.head_dim;
      const T* const at = from.data + (present ? (first + row) * from.row + chunk * kHalves : 0);
      cp_async_16(tile + tile_offset<DIM>(row, chunk), at, present);
    }
    return;
  }
#pragma unroll 1
  for (int n = threadIdx.x; n < count; n += step) {
    const int row = n / kChunks, chunk = n % kChunks;
    const int channels = first + row < length ? min(access.head_dim - chunk * kHalves, kHalves) : 0;
    const T* const at = from.data + (first + row) * from.row + chunk * kHalves * from.channel;
    Pack<T> pack = {};
    unroll<kHalves>([&](int c) {
      if (c < channels) pack.at[c] = at[c * from.channel];
    });
    store_pack(tile + tile_offset<DIM>(row, chunk), pack);
  }
}

// Waits for the block's asynchronous copies.
CRATE_DEVICE void finish_copies() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// Writes a warp's `rows` of a tile to rows [first, ...) below `length`, but for the first `skipped`.
template <class T, int DIM>
CRATE_DEVICE void store_tile(const View<T>& to, const T* tile, int rows, int first, int length, const Access& access,
                             int skipped = 0) {
  constexpr int kChunks = DIM / kHalves;
#pragma unroll 1
  for (int n = skipped * kChunks + threadIdx.x % kWarp; n < rows * kChunks; n += kWarp) {
    const int row = n / kChunks, chunk = n % kChunks, channel = chunk * kHalves;
    if (first + row >= length || channel >= access.head_dim) continue;
    const Pack<T> pack = load_pack(tile + tile_offset<DIM>(row, chunk));
    T* const at = to.data + (first + row) * to.row;
    if (access.wide) {
      store_pack(at + channel, pack);
    } else {
      for (int c = 0; c < kHalves && channel + c < access.head_dim; ++c) at[(channel + c) * to.channel] = pack.at[c];
    }
  }
}

// Operands below start at a row of a tile that is a multiple of 8; k counts 16 channels.

// Rows 0 to 15 as left operand.
template <int DIM, class T>
CRATE_DEVICE void left(uint32_t (&a)[4], const T* tile, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4(a, tile + tile_offset<DIM>(lane % 16, 2 * k + lane / 16));
}

// The transpose of rows 0 to 15 as left operand: its rows are channels.
template <int DIM, class T>
CRATE_DEVICE void left_transposed(uint32_t (&a)[4], const T* tile, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4_trans(a, tile + tile_offset<DIM>(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
}

// The transpose of rows 0 to 7 and of rows 8 to 15 as two right operands: their columns are rows of the tile.
template <int DIM, class T>
CRATE_DEVICE void right_transposed(uint32_t (&b)[2][2], const T* tile, int k) {
  const int lane = threadIdx.x % kWarp;
  uint32_t r[4];  // (16, 16) per warp
  ldmatrix_x4(r, tile + tile_offset<DIM>(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Rows 0 to 15 as two right operands, of 8 channels each.
template <int DIM, class T>
CRATE_DEVICE void right(uint32_t (&b)[2][2], const T* tile, int k) {
  const int lane = threadIdx.x % kWarp;
  uint32_t r[4];  // (16, 16) per warp
  ldmatrix_x4_trans(r, tile + tile_offset<DIM>(lane % 16, 2 * k + lane / 16));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// A warp's own 16 ROWS16 rows as left operand: in registers, or read again for every product.
template <class T, int DIM, int ROWS16, bool IN_REGISTERS>
struct Own {
  const T* tile;
  uint32_t fragments[IN_REGISTERS ? ROWS16 : 1][IN_REGISTERS ? DIM / 16 : 1][4];  // (16 ROWS16, DIM) per warp

  CRATE_DEVICE void load(const T* from) {
    tile = from;
    if constexpr (IN_REGISTERS) {
      unroll<ROWS16, DIM / 16>([&](int m, int k) { left<DIM>(fragments[m][k], tile + m * 16 * DIM, k); });
    }
  }

  CRATE_DEVICE void get(uint32_t (&a)[4], int m, int k) const {
    if constexpr (IN_REGISTERS) {
      unroll<4>([&](int i) { a[i] = fragments[m][k][i]; });
    } else {
      left<DIM>(a, tile + m * 16 * DIM, k);
    }
  }
};

// first, second += a times the two operands of `right` or `right_transposed`.
template <class T>
CRATE_DEVICE void add_pair(float (&first)[4], float (&second)[4], const uint32_t (&a)[4], const uint32_t (&b)[2][2]) {
  mma_16816<T>(first, a, b[0]);
  mma_16816<T>(second, a, b[1]);
}

// acc += p w for 16 rows of w. p is packed: two products side by side.
template <class T, int DIM, int ROWS16>
CRATE_DEVICE void add_rows(float (&acc)[ROWS16][DIM / 8][4], const uint32_t (&p)[ROWS16][4], const T* tile) {
  unroll<DIM / 16>([&](int k) {
    uint32_t b[2][2];  // (16, 16): 16 rows, 16 channels
    right<DIM>(b, tile, k);
    unroll<ROWS16>([&](int m) { add_pair<T>(acc[m][2 * k], acc[m][2 * k + 1], p[m], b); });
  });
}

// Two products side by side, rounded, as left operand.
template <class T>
CRATE_DEVICE void pack_left(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = pack_pair<T>(first[0], first[1]);
  a[1] = pack_pair<T>(first[2], first[3]);
  a[2] = pack_pair<T>(second[0], second[1]);
  a[3] = pack_pair<T>(second[2], second[3]);
}

// Writes 16 rows of an accumulator, each times its factor, to 16 rows of a tile.
template <class T, int DIM>
CRATE_DEVICE void round_rows(T* tile, const float (&acc)[DIM / 8][4], float upper, float lower) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  unroll<DIM / 8>([&](int n) {
    const uint32_t a = pack_pair<T>(acc[n][0] * upper, acc[n][1] * upper);
    const uint32_t b = pack_pair<T>(acc[n][2] * lower, acc[n][3] * lower);
    memcpy(tile + tile_offset<DIM>(g, n) + 2 * t, &a, sizeof a);
    memcpy(tile + tile_offset<DIM>(g + 8, n) + 2 * t, &b, sizeof b);
  });
}

// The sum or the maximum over the four lanes that share a row of a product.
CRATE_DEVICE float row_sum(float v) {
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

CRATE_DEVICE float row_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, 1));
  return fmaxf(v, __shfl_xor_sync(kAllLanes, v, 2));
}

// Dropout mask of 16 rows and COLUMNS columns: bit 4 n + e keeps element e of the n-th product of 8 columns. Rows are
// queries and columns keys, or the reverse. Not unrolled: each Philox word takes 100 instructions.
template <int COLUMNS>
CRATE_DEVICE uint32_t kept_bits(uint64_t seed, const Problem& call, const Head& head, int row, int column,
                                bool reverse) {
  static_assert(COLUMNS <= 64);
  const int lane = threadIdx.x % kWarp;
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < COLUMNS / 2; ++i) {
    const uint32_t r = row + lane / 4 + i / 2 % 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    bits |= static_cast<uint32_t>(keeps(call, head, seed, reverse ? c : r, reverse ? r : c)) << i;
  }
  return bits;
}

// Padding mask of a lane's part of COLUMNS keys: bit 2 n + e says whether column e of the n-th product is a key.
template <int COLUMNS>
CRATE_DEVICE uint32_t key_bits(const uint8_t* key_mask, int key, int length) {
  uint32_t bits = 0;
  unroll<COLUMNS / 4>([&](int i) {
    const int at = key + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
    if (at < length && key_mask[at]) bits |= 1u << i;
  });
  return bits;
}

// exp(scale * score - base); base is the row's maximum or logsumexp. The scaled score is rounded before the difference,
// so that the largest one gives exactly 0, forward and backward. A fused multiply-add would keep its rounding error:
// for scores around ten thousand, a weight of 1.002 instead of 1. For the same reason scores are not scaled by log2(e).
CRATE_DEVICE float weight(float score, float scale, float base) {
  return exp2_fast((__fmul_rn(score, scale) - base) * 1.44269504f);
}

}  // namespace crate_kernels::mssa
