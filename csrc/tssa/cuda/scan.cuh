// Sums over the chunks of a sequence: in all, before each chunk, or behind each chunk.
#pragma once

#include "call.cuh"

namespace crate_kernels {

enum class TssaScan : int { total, before, behind };

struct TssaSums {
  float* sums;  // (nsequences, nchunks + 1, size): one per chunk, then the total
  int nchunks, size;
  TssaScan scan;
  // Sums before the first chunk, or null: (nsequences, size - heads) and (nsequences, heads).
  const float *channels, *by_head;
  int heads;
};

constexpr int kScanColumns = 32, kScanParts = 16;

// A block has 32 columns of a sequence and 16 threads per column, each with a run of chunks. It adds up each run, then
// the runs before each run. Unless only the total is wanted, it replaces each chunk's sum by the sum of the chunks
// before it (or behind it, if it starts from the last chunk). 3 passes over the sums, or 1; the order is fixed.
template <class = void>
__global__ void __launch_bounds__(kScanColumns* kScanParts) tssa_scan_chunks_kernel(TssaSums a) {
  const int blocks = (a.size + kScanColumns - 1) / kScanColumns, index = static_cast<int>(blockIdx.x) / blocks;
  const int lane = threadIdx.x % kScanColumns, part = threadIdx.x / kScanColumns;
  const int column = (static_cast<int>(blockIdx.x) - index * blocks) * kScanColumns + lane;
  const int run = (a.nchunks + kScanParts - 1) / kScanParts;
  const int first = part * run < a.nchunks ? part * run : a.nchunks;
  const int last = first + run < a.nchunks ? first + run : a.nchunks;
  float* const sums = a.sums + static_cast<int64_t>(index) * (a.nchunks + 1) * a.size + column;
  float* const parts = reinterpret_cast<float*>(shared_memory());
  const auto place = [&](int chunk) -> float& {
    return sums[static_cast<int64_t>(a.scan == TssaScan::behind ? a.nchunks - 1 - chunk : chunk) * a.size];
  };

  float some = 0.0f;
  if (column < a.size) {
#pragma unroll 8
    for (int chunk = first; chunk < last; ++chunk) some += place(chunk);
  }
  parts[part * kScanColumns + lane] = some;
  __syncthreads();
  if (column >= a.size) return;
  float before = 0.0f;
  if (a.channels != nullptr && column < a.size - a.heads)
    before = a.channels[static_cast<int64_t>(index) * (a.size - a.heads) + column];
  if (a.by_head != nullptr && column >= a.size - a.heads)
    before = a.by_head[static_cast<int64_t>(index) * a.heads + column - (a.size - a.heads)];
  for (int earlier = 0; earlier < part; ++earlier) before += parts[earlier * kScanColumns + lane];
  if (part == kScanParts - 1) sums[static_cast<int64_t>(a.nchunks) * a.size] = before + some;
  if (a.scan == TssaScan::total) return;
#pragma unroll 8
  for (int chunk = first; chunk < last; ++chunk) {
    const float own = place(chunk);
    place(chunk) = before;
    before += own;
  }
}

}  // namespace crate_kernels
