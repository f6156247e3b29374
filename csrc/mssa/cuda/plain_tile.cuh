// Tiles of the plain kernels: copies to shared memory, products, writing rows.
#pragma once

#include "plain.cuh"

namespace crate_kernels {
namespace plain {

CRATE_DEVICE float element(const Problem& c, const char* data, int64_t offset) {
  if (c.dtype == Dtype::f32) return reinterpret_cast<const float*>(data)[offset];
  if (c.dtype == Dtype::bf16) return to_float(reinterpret_cast<const bf16*>(data)[offset]);
  return to_float(reinterpret_cast<const fp16*>(data)[offset]);
}

template <class T>
CRATE_DEVICE void put_halves(float* to, const uint4& bits) {
  const float2 a = unpack_pair<T>(bits.x), b = unpack_pair<T>(bits.y);
  const float2 c = unpack_pair<T>(bits.z), d = unpack_pair<T>(bits.w);
  *reinterpret_cast<float4*>(to) = make_float4(a.x, a.y, b.x, b.y);
  *reinterpret_cast<float4*>(to + 4) = make_float4(c.x, c.y, d.x, d.y);
}

// Copies channels [channel, channel + kChunk) of ROWS rows from `first` on to shared memory; zeros past the end. The
// dtype is not a template argument: one branch per 16 bytes instead of three times as many kernels.
template <int ROWS>
CRATE_DEVICE void stage(const Problem& c, float* tile, const HeadRows& t, int first, int length, int channel) {
  if (!t.wide) {
#pragma unroll 1
    for (int n = threadIdx.x; n < ROWS * kChunk; n += kThreads) {
      const int row = n / kChunk, d = n % kChunk;
      const bool exists = first + row < length && channel + d < c.access.head_dim;
      const int64_t offset = (first + row) * t.row + (channel + d) * t.channel;
      tile[row * kPitch + d] = exists ? element(c, t.data, offset) : 0.0f;
    }
    return;
  }
  const bool whole = c.dtype == Dtype::f32;
  const int packs = whole ? kChunk / 4 : kChunk / 8, shift = whole ? 4 : 3;  // of a row
#pragma unroll 4
  for (int n = threadIdx.x; n < ROWS * packs; n += kThreads) {
    const int row = n >> shift, pack = n & (packs - 1), d = channel + pack * (whole ? 4 : 8);
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (first + row < length && d < c.access.head_dim) {
      const int64_t offset = (first + row) * t.row + d;
      bits = *reinterpret_cast<const uint4*>(t.data + offset * (whole ? 4 : 2));
    }
    float* const to = tile + row * kPitch + d - channel;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = bits;
    } else if (c.dtype == Dtype::bf16) {
      put_halves<bf16>(to, bits);
    } else {
      put_halves<fp16>(to, bits);
    }
  }
}

CRATE_DEVICE void put_element(const Problem& c, char* data, int64_t offset, float v) {
  if (c.dtype == Dtype::f32) {
    reinterpret_cast<float*>(data)[offset] = v;
  } else if (c.dtype == Dtype::bf16) {
    reinterpret_cast<bf16*>(data)[offset] = from_float<bf16>(v);
  } else {
    reinterpret_cast<fp16*>(data)[offset] = from_float<fp16>(v);
  }
}

template <class T>
CRATE_DEVICE uint4 halves_at(const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
  return make_uint4(pack_pair<T>(a.x, a.y), pack_pair<T>(a.z, a.w), pack_pair<T>(b.x, b.y), pack_pair<T>(b.z, b.w));
}

// Copies a chunk of the owned rows from shared memory to channels [channel, channel + kChunk). Writes directly from the
// threads' registers would be 8 bytes each, and three times the code of everything else.
CRATE_DEVICE void unstage(const Problem& c, const float* tile, const HeadRows& t, int first, int length, int channel) {
  if (!t.wide) {
#pragma unroll 1
    for (int n = threadIdx.x; n < kOwned * kChunk; n += kThreads) {
      const int row = n / kChunk, d = n % kChunk;
      if (first + row >= length || channel + d >= c.access.head_dim) continue;
      put_element(c, t.data, (first + row) * t.row + (channel + d) * t.channel, tile[row * kPitch + d]);
    }
    return;
  }
  const bool whole = c.dtype == Dtype::f32;
  const int packs = whole ? kChunk / 4 : kChunk / 8, shift = whole ? 4 : 3;  // of a row
#pragma unroll 1
  for (int n = threadIdx.x; n < kOwned * packs; n += kThreads) {
    const int row = n >> shift, pack = n & (packs - 1), d = channel + pack * (whole ? 4 : 8);
    if (first + row >= length || d >= c.access.head_dim) continue;
    const float* const from = tile + row * kPitch + d - channel;
    uint4 bits;
    if (whole) {
      bits = *reinterpret_cast<const uint4*>(from);
    } else if (c.dtype == Dtype::bf16) {
      bits = halves_at<bf16>(from);
    } else {
      bits = halves_at<fp16>(from);
    }
    const int64_t offset = (first + row) * t.row + d;
    *reinterpret_cast<uint4*>(t.data + offset * (whole ? 4 : 2)) = bits;
  }
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

// Adds the scores of one chunk of a wide head, forward and backward alike. Adding hundreds of squares to one number, as
// on the diagonal, would lose digits.
CRATE_DEVICE void add_chunk(float (&s)[kPart][kPart], const float (&sum)[kPart][kPart]) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) s[i][j] += sum[i][j];
  }
}

// sum += weights tile: a thread's 4 rows, and groups of four of the kChunk columns, 32 apart. Each tile is summed from
// 0: adding the weights of thousands of tiles one by one to the output would lose digits.
CRATE_DEVICE void add_weighted(float (&sum)[kPart][kColumns], const float* weights, const float* tile, const Thread& t,
                               int count) {
  const float* const row = weights + t.row * kWeightPitch;
  const float* const columns = tile + 4 * t.column;
#pragma unroll 1
  for (int n = 0; n < count; n += 4) {
    float p[kPart][4];
#pragma unroll
    for (int i = 0; i < kPart; ++i) load4(row + 4 * i * kWeightPitch + n, p[i]);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
#pragma unroll
      for (int m = 0; m < kChunk / 32; ++m) {
        float v[4];
        load4(columns + (n + u) * kPitch + 32 * m, v);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i][4 * m + k] += p[i][u] * v[k];
        }
      }
    }
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
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
#pragma unroll
      for (int m = 0; m < kChunk / 32; ++m) {
        const float* const v = acc[n][i] + 4 * m;
        *reinterpret_cast<float4*>(tile + t.row_at(i) * kPitch + 32 * m + 4 * t.column) =
            make_float4(v[0] * factor[i], v[1] * factor[i], v[2] * factor[i], v[3] * factor[i]);
      }
    }
    __syncthreads();
    unstage(c, tile, to, start, length, (first_chunk + n) * kChunk);
  }
}

// Stores a thread's part of a tile of weights for its warp.
CRATE_DEVICE void put_weights(float* weights, const float (&p)[kPart][kPart], const Thread& t) {
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) weights[t.row_at(i) * kWeightPitch + t.column_at(j)] = p[i][j];
  }
}

// Dropout mask of a thread's weights: bit kPart * i + j for row + 4 i as query and column + 8 j as key, or the reverse.
// Not unrolled: unrolled, it would be most of the kernel.
CRATE_DEVICE uint32_t keep_bits(const Problem& c, const Head& h, int row, int column, bool row_is_query) {
  if (c.seed == nullptr) return 0xffff;
  const uint64_t seed = *c.seed;
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kPart * kPart; ++n) {
    const uint32_t r = row + 4 * (n / kPart), s = column + kColumnLanes * (n % kPart);
    const uint32_t word = philox_word0(seed, row_is_query ? s : r, row_is_query ? r : s, h.batch * c.nheads + h.head);
    bits |= static_cast<uint32_t>(word > c.drop_last) << n;
  }
  return bits;
}

// Zeros the packed rows after sequence h that no sequence covers; only offsets that do not rise leave any.
CRATE_DEVICE void zero_uncovered(const Problem& c, const Rows& tokens, float* numbers, const Head& h, int block) {
  if (c.cu_seqlens == nullptr) return;
  const int64_t stop = h.batch == c.sequences - 1 ? c.total : clamped_offset(c, h.batch + 1);
  const Head whole = {0, h.head, 0, 0};
  const HeadRows t = rows_of(c, tokens, whole);
  for (int64_t row = h.first + h.length + block; row < stop; row += c.blocks) {
#pragma unroll 1
    for (int d = threadIdx.x; d < c.access.head_dim; d += kThreads) {
      put_element(c, t.data, row * t.row + d * t.channel, 0.0f);
    }
    if (numbers != nullptr && threadIdx.x == 0) numbers[static_cast<int64_t>(h.head) * c.total + row] = 0.0f;
  }
}

}  // namespace plain
}  // namespace crate_kernels
