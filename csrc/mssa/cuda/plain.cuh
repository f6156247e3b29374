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

constexpr int kThreads = 128, kOwned = 64, kTile = 32, kChunk = 64;
constexpr int kPart = 4;                 // rows and columns per thread
constexpr int kColumnLanes = 8;          // lanes of a warp along a row
constexpr int kWarpRows = 16;            // rows per warp
constexpr int kWeightPitch = kTile + 8;  // floats between rows of weights in shared memory

constexpr int kPitch = kChunk + 4;               // floats between staged rows: odd in units of 16 bytes
constexpr int kColumns = kChunk / kColumnLanes;  // per thread, of a chunk of the output

using mssa::Head, mssa::Keys, mssa::Problem, mssa::Span;

// The part of the problem that a block computes. Groups vary fastest.
struct Place {
  int head, block, group;
};

CRATE_DEVICE Place place_of(const Problem& c) {
  const int rows = blockIdx.x / c.groups;
  return {rows / c.blocks, rows % c.blocks, static_cast<int>(blockIdx.x) % c.groups};
}

// The rows of one head.
struct HeadRows {
  char* data;
  int64_t row, channel;
  bool wide;
};

CRATE_DEVICE HeadRows rows_of(const Problem& c, const Rows& t, const Head& h) {
  return {static_cast<char*>(t.data) + h.offset(c, t) * (c.dtype == Dtype::f32 ? 4 : 2), t.row, t.channel, t.wide};
}

}  // namespace crate_kernels::plain
