// Subspace attention by fp32 products of the CUDA cores: for fp32 tokens, GPUs before sm_80, and every other call that
// the tensor-core kernels refuse.
//
// A block of kThreads owns kOwned rows of one head and walks over tiles of kTile rows. Both are in shared memory as
// fp32, kChunk channels at a time, so that less than Turing's 64 KB of shared memory serves every head_dim. A tile is
// key and value. A thread has a 4 x 4 part of the scores: rows of its warp that are 4 apart, and columns 8 apart. With
// these pitches it has no bank conflicts. A block accumulates up to CHUNKS chunks of the output, as many as fit its
// registers. Wider heads are cut into groups of chunks. Each group has its own blocks, which compute the scores again.
#pragma once

#include "head.cuh"

namespace crate_kernels::plain {

constexpr int kThreads = 128, kOwned = 64, kTile = 32, kChunkBits = 6, kChunk = 1 << kChunkBits;
constexpr int kPart = 4;                 // rows and columns per thread
constexpr int kColumnLanes = 8;          // lanes of a warp along a row
constexpr int kWarpRows = 16;            // rows per warp
constexpr int kWeightPitch = kTile + 8;  // floats between rows of weights in shared memory

constexpr int kPitch = kChunk + 4;               // floats between staged rows: odd in units of 16 bytes
constexpr int kColumns = kChunk / kColumnLanes;  // per thread, of a chunk of the output

using mssa::Head, mssa::Keys, mssa::Problem, mssa::Rows, mssa::Span;

// The part of the problem that a block computes. Groups vary fastest.
struct BlockPlace {
  int head, block, group;
};

CRATE_DEVICE BlockPlace place_of(const Problem& c) {
  const int rows = blockIdx.x / c.groups;
  return {rows / c.blocks, rows % c.blocks, static_cast<int>(blockIdx.x) % c.groups};
}

// The rows of one head.
struct HeadRows {
  char* data;
  int64_t row, channel;
  bool wide;
};

CRATE_DEVICE HeadRows rows_of(const Problem& c, const Rows& t, const Head& h, Dtype dtype) {
  return {static_cast<char*>(t.data) + h.offset(c, t) * (dtype == Dtype::f32 ? 4 : 2), t.row, t.channel, t.wide};
}
CRATE_DEVICE HeadRows rows_of(const Problem& c, const Rows& t, const Head& h) {
  return rows_of(c, t, h, c.dtype);
}

// The tokens that a head's rows meet. Places of rows and of tokens are compared by masks, and draw dropout.
struct OtherTokens {
  int before, start;  // places of the first row and of the first token
  int length;
  const uint8_t* key_mask;  // null: every token is a key
  int64_t row;              // of tensors of a number per token
};

CRATE_DEVICE OtherTokens itself(const Head& h, const uint8_t* key_mask) {
  return {0, 0, h.length, key_mask, h.row};
}
CRATE_DEVICE OtherTokens another_range(const Problem& c, const Head& h) {
  const mssa::Range& r = c.key_range;
  return {r.row_start, r.start, r.count,
          r.key_padding_mask == nullptr ? nullptr : r.key_padding_mask + static_cast<int64_t>(h.sequence) * r.count,
          (static_cast<int64_t>(h.sequence) * c.nheads + h.head) * r.count};
}

// APART: the rows meet another range of their sequence. Decided at run time, it would cost all other calls registers.
template <bool APART>
CRATE_DEVICE Head head_of(const Problem& c, int index) {
  Head h(c, index);
  if (APART) h.counter = static_cast<uint32_t>(h.sequence * c.key_range.nheads + c.key_range.first_head + h.head);
  return h;
}

// Calls f with a zero of the element type. The dtype is not a template argument of the kernels: one branch per 16 bytes
// instead of three times as many kernels.
template <class F>
CRATE_DEVICE auto typed(Dtype dtype, const F& f) {
  if (dtype == Dtype::f32) return f(float{});
  if (dtype == Dtype::bf16) return f(bf16{});
  return f(fp16{});
}

CRATE_DEVICE float element(Dtype dtype, const char* data, int64_t offset) {
  return typed(dtype, [&](auto zero) { return to_float(reinterpret_cast<const decltype(zero)*>(data)[offset]); });
}

CRATE_DEVICE void put_element(Dtype dtype, char* data, int64_t offset, float v) {
  typed(dtype, [&](auto zero) { reinterpret_cast<decltype(zero)*>(data)[offset] = from_float<decltype(zero)>(v); });
}

// Converts 16 bytes of elements to floats in shared memory.
CRATE_DEVICE void put_pack(float* to, const uint4& bits, float) {
  *reinterpret_cast<uint4*>(to) = bits;
}
template <class T>
CRATE_DEVICE void put_pack(float* to, const uint4& bits, T) {
  const float2 a = unpack_pair<T>(bits.x), b = unpack_pair<T>(bits.y);
  const float2 c = unpack_pair<T>(bits.z), d = unpack_pair<T>(bits.w);
  *reinterpret_cast<float4*>(to) = make_float4(a.x, a.y, b.x, b.y);
  *reinterpret_cast<float4*>(to + 4) = make_float4(c.x, c.y, d.x, d.y);
}

// Converts floats in shared memory to 16 bytes of elements.
CRATE_DEVICE uint4 pack_at(const float* from, float) {
  return *reinterpret_cast<const uint4*>(from);
}
template <class T>
CRATE_DEVICE uint4 pack_at(const float* from, T) {
  const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
  return make_uint4(pack_pair<T>(a.x, a.y), pack_pair<T>(a.z, a.w), pack_pair<T>(b.x, b.y), pack_pair<T>(b.z, b.w));
}

// Rows of a head from `first` on and the channels of one chunk of them: `ROWS` rows in device memory, and their tile in
// shared memory.
struct Chunk {
  const Problem& c;
  const HeadRows& t;
  Dtype dtype;
  int first, length, channel;

  // Calls single(row, d) for each element, or pack(row, d) for each 16 bytes; d counts from the chunk's first channel.
  template <int ROWS, int UNROLL, class Single, class Whole>
  CRATE_DEVICE void each(const Single& single, const Whole& pack) const {
    if (!t.wide) {
#pragma unroll 1
      for (int n = threadIdx.x; n < ROWS * kChunk; n += kThreads) single(n / kChunk, n % kChunk);
      return;
    }
    const int shift = dtype == Dtype::f32 ? 4 : 3;  // 16 or 8 packs per row
#pragma unroll UNROLL
    for (int n = threadIdx.x; n < ROWS << shift; n += kThreads) {
      pack(n >> shift, (n << (kChunkBits - shift)) & (kChunk - 1));
    }
  }
  CRATE_DEVICE bool has(int row, int d) const { return first + row < length && channel + d < c.access.head_dim; }
  CRATE_DEVICE int64_t offset(int row, int d) const { return (first + row) * t.row + (channel + d) * t.channel; }
  CRATE_DEVICE uint4* pack(int row, int d) const {
    const int64_t at = (first + row) * t.row + channel + d;
    return reinterpret_cast<uint4*>(t.data + at * (dtype == Dtype::f32 ? 4 : 2));
  }
};

// Copies a chunk of ROWS rows to shared memory; zeros past the end.
template <int ROWS>
CRATE_DEVICE void stage(const Problem& c, float* tile, const HeadRows& t, int first, int length, int channel) {
  const Chunk chunk = {c, t, c.dtype, first, length, channel};
  chunk.each<ROWS, 4>(
      [&](int row, int d) {
        tile[row * kPitch + d] = chunk.has(row, d) ? element(c.dtype, t.data, chunk.offset(row, d)) : 0.0f;
      },
      [&](int row, int d) {
        const uint4 bits = chunk.has(row, d) ? *chunk.pack(row, d) : make_uint4(0, 0, 0, 0);
        typed(c.dtype, [&](auto zero) { put_pack(tile + row * kPitch + d, bits, zero); });
      });
}

// Copies a chunk of the owned rows from shared memory. Writes directly from the threads' registers would be 8 bytes
// each, and three times the code of everything else.
CRATE_DEVICE void unstage(const Problem& c, const float* tile, const HeadRows& t, int first, int length, int channel) {
  const Chunk chunk = {c, t, c.out_dtype, first, length, channel};
  chunk.each<kOwned, 1>(
      [&](int row, int d) {
        if (chunk.has(row, d)) put_element(c.out_dtype, t.data, chunk.offset(row, d), tile[row * kPitch + d]);
      },
      [&](int row, int d) {
        if (!chunk.has(row, d)) return;
        *chunk.pack(row, d) = typed(c.out_dtype, [&](auto zero) { return pack_at(tile + row * kPitch + d, zero); });
      });
}

CRATE_DEVICE void load4(const float* from, float (&v)[4]) {
  const float4 a = *reinterpret_cast<const float4*>(from);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
}

// Rounds the scaled score before anything is subtracted, forward and backward. The weight of a row's only key is then
// exactly 1 in both.
CRATE_DEVICE float scaled(float s, float scale) {
  return __fmul_rn(s, scale);
}

// A thread's place in its block.
struct Thread {
  int warp_row;     // the first of its warp's rows
  int row, column;  // of its first score; the others are 4 rows and 8 columns apart
  CRATE_DEVICE Thread()
      : warp_row(threadIdx.x / kWarp * kWarpRows),
        row(warp_row + threadIdx.x % kWarp / kColumnLanes),
        column(threadIdx.x % kColumnLanes) {}
  CRATE_DEVICE int row_at(int i) const { return row + 4 * i; }
  CRATE_DEVICE int column_at(int j) const { return column + kColumnLanes * j; }
};

// Channels of a chunk below head_dim, rounded up to fours.
CRATE_DEVICE int channels_of(const Problem& c, int chunk) {
  const int left = (c.access.head_dim - chunk * kChunk + 3) / 4 * 4;
  return left < kChunk ? left : kChunk;
}

// Adds a sum over one chunk or one tile. Each is summed from 0: adding hundreds of squares to one score, as on the
// diagonal, or the weights of thousands of tiles one by one to the output, would lose digits.
template <int N>
CRATE_DEVICE void add_sum(float (&total)[kPart][N], const float (&sum)[kPart][N]) {
  unroll<kPart, N>([&](int i, int j) { total[i][j] += sum[i][j]; });
}

// sum += weights tile: a thread's 4 rows, and groups of four of the kChunk columns, 32 apart.
CRATE_DEVICE void add_weighted(float (&sum)[kPart][kColumns], const float* weights, const float* tile, const Thread& t,
                               int count) {
  const float* const row = weights + t.row * kWeightPitch;
  const float* const columns = tile + 4 * t.column;
#pragma unroll 1
  for (int n = 0; n < count; n += 4) {
    float p[kPart][4];  // (kPart rows, 4 keys) per thread
    unroll<kPart>([&](int i) { load4(row + 4 * i * kWeightPitch + n, p[i]); });
    unroll<4, kChunk / 32>([&](int u, int m) {
      float v[4];  // (4 channels,) of a key
      load4(columns + (n + u) * kPitch + 32 * m, v);
      unroll<kPart, 4>([&](int i, int k) { sum[i][4 * m + k] += p[i][u] * v[k]; });
    });
  }
}

// Writes the owned rows' chunks from `first_chunk` on; row i times factor[i]. `tile`, the owned rows' own, is scratch.
template <int CHUNKS>
CRATE_DEVICE void write_rows(const Problem& c, float* tile, const HeadRows& to,
                             const float (&acc)[CHUNKS][kPart][kColumns], const float (&factor)[kPart], const Thread& t,
                             int start, int length, int first_chunk) {
#pragma unroll
  for (int n = 0; n < CHUNKS; ++n) {
    __syncthreads();
    unroll<kPart, kChunk / 32>([&](int i, int m) {
      const float* const v = acc[n][i] + 4 * m;
      *reinterpret_cast<float4*>(tile + t.row_at(i) * kPitch + 32 * m + 4 * t.column) =
          make_float4(v[0] * factor[i], v[1] * factor[i], v[2] * factor[i], v[3] * factor[i]);
    });
    __syncthreads();
    unstage(c, tile, to, start, length, (first_chunk + n) * kChunk);
  }
}

// Stores a thread's part of a tile of weights for its warp.
CRATE_DEVICE void put_weights(float* weights, const float (&p)[kPart][kPart], const Thread& t) {
  unroll<kPart, kPart>([&](int i, int j) { weights[t.row_at(i) * kWeightPitch + t.column_at(j)] = p[i][j]; });
}

// Dropout mask of a thread's weights: bit kPart * i + j for row + 4 i as query and column + 8 j as key, or the reverse.
// Not unrolled: unrolled, it would be most of the kernel.
CRATE_DEVICE uint32_t keep_bits(const Problem& c, const Head& h, int row, int column, bool row_is_query) {
  if (c.masking.seed == nullptr) return 0xffff;
  const uint64_t seed = *c.masking.seed;
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kPart * kPart; ++n) {
    const uint32_t r = row + 4 * (n / kPart), s = column + kColumnLanes * (n % kPart);
    bits |= static_cast<uint32_t>(keeps(c, h, seed, row_is_query ? r : s, row_is_query ? s : r)) << n;
  }
  return bits;
}

}  // namespace crate_kernels::plain
