// Subspace attention by fp32 products of the CUDA cores: for fp32 tokens, GPUs before sm_80, and every other call that
// the tensor-core kernels refuse.
//
// A block of kThreads owns kOwned rows of one head and walks over tiles of kTile rows. Both are in shared memory as
// fp32, kChunk channels at a time, so that less than Turing's 64 KB of shared memory serves every head_dim. A tile is
// key and value. A thread has a 4 x 4 part of the scores: rows of its warp that are 4 apart, and columns 8 apart. With
// these pitches it has no bank conflicts. A block accumulates up to CHUNKS chunks of the output, as many as fit its
// registers. Wider heads are cut into groups of chunks. Each group has its own blocks, which compute the scores again.
#pragma once

#include "../../common/cuda/device.cuh"
#include "../../common/cuda/philox.cuh"
#include "problem.cuh"

namespace crate_kernels {
namespace plain {

constexpr int kThreads = 128, kOwned = 64, kTile = 32, kChunk = 64;
constexpr int kPart = 4;                 // rows and columns per thread
constexpr int kColumnLanes = 8;          // lanes of a warp along a row
constexpr int kWarpRows = 16;            // rows per warp
constexpr int kWeightPitch = kTile + 8;  // floats between rows of weights in shared memory

constexpr int kPitch = kChunk + 4;               // floats between staged rows: odd in units of 16 bytes
constexpr int kColumns = kChunk / kColumnLanes;  // per thread, of a chunk of the output

using mssa::Problem;

// The part of the problem that a block computes. Groups vary fastest.
struct Place {
  int head, block, group;
};

CRATE_DEVICE Place place_of(const Problem& c) {
  const int rows = blockIdx.x / c.groups;
  return {rows / c.blocks, rows % c.blocks, static_cast<int>(blockIdx.x) % c.groups};
}

// One head of one sequence: its first row if packed, and its number of rows.
struct Head {
  int batch, head, length;
  int64_t first;
};

CRATE_DEVICE int64_t clamped_offset(const Problem& c, int index) {
  const int64_t offset = c.cu_seqlens[index];
  return offset < 0 ? 0 : offset > c.total ? c.total : offset;
}

CRATE_DEVICE Head head_of(const Problem& c, int index) {
  Head h = {index / c.nheads, index % c.nheads, c.seqlen, 0};
  if (c.cu_seqlens != nullptr) {
    h.first = clamped_offset(c, h.batch);
    const int64_t length = clamped_offset(c, h.batch + 1) - h.first;
    h.length = static_cast<int>(length < 0 ? 0 : length > c.seqlen ? c.seqlen : length);
  }
  return h;
}

// Offset of a head in lse, delta and dlse, which have one number per row.
CRATE_DEVICE int64_t number_of(const Problem& c, const Head& h) {
  return c.cu_seqlens != nullptr ? static_cast<int64_t>(h.head) * c.total + h.first
                                 : (static_cast<int64_t>(h.batch) * c.nheads + h.head) * c.seqlen;
}

// The rows of one head.
struct HeadRows {
  char* data;
  int64_t row, channel;
  bool wide;
};

CRATE_DEVICE HeadRows rows_of(const Problem& c, const Rows& t, const Head& h) {
  const int64_t offset = (c.cu_seqlens != nullptr ? 0 : h.batch * t.batch) + h.head * t.head + h.first * t.row;
  return {static_cast<char*>(t.data) + offset * (c.dtype == Dtype::f32 ? 4 : 2), t.row, t.channel, t.wide};
}

}  // namespace plain
}  // namespace crate_kernels
