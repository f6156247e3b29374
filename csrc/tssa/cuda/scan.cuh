// Sums over the chunks of a sequence: in all, before each chunk, or behind each chunk.
#pragma once

#include "call.cuh"

namespace crate_kernels {

enum class TssaScan : int { total, before, behind };

struct TssaSums {
  float* sums;  // (nsequences, nchunks + 1, size): one per chunk, then the total
  int nchunks, size;
  TssaScan scan;
  // Sums before the first chunk, or null: (nsequences, size - heads) and (nsequences, heads). They become the totals.
  double *channels, *by_head;
  int heads;
};

constexpr int kScanColumns = 32, kScanParts = 16;

// A block has 32 columns of a sequence and 16 threads per column, each with a run of chunks. It adds up each run, then
// the runs before each run. Unless only the total is wanted, it replaces each chunk's sum by the sum of the chunks
// before it (or behind it, if it starts from the last chunk). 3 passes over the sums, or 1; the order is fixed.
// Totals are fp64: in fp32, thousands of chunks would each round them.
__global__ void __launch_bounds__(kScanColumns* kScanParts) tssa_scan_chunks_kernel(TssaSums a) {
  const int blocks = (a.size + kScanColumns - 1) / kScanColumns, index = static_cast<int>(blockIdx.x) / blocks;
  const int lane = threadIdx.x % kScanColumns, part = threadIdx.x / kScanColumns;
  const int column = (static_cast<int>(blockIdx.x) - index * blocks) * kScanColumns + lane;
  const int run = (a.nchunks + kScanParts - 1) / kScanParts;
  const int first = part * run < a.nchunks ? part * run : a.nchunks;
  const int last = first + run < a.nchunks ? first + run : a.nchunks;
  float* const sums = a.sums + static_cast<int64_t>(index) * (a.nchunks + 1) * a.size + column;
  double* const parts = reinterpret_cast<double*>(shared_memory());
  const auto place = [&](int chunk) -> float& {
    return sums[static_cast<int64_t>(a.scan == TssaScan::behind ? a.nchunks - 1 - chunk : chunk) * a.size];
  };

  double some = 0.0, before = 0.0;
  double* state = nullptr;
  if (column < a.size) {
#pragma unroll 8
    for (int chunk = first; chunk < last; ++chunk) some += place(chunk);
    const int channels = a.size - a.heads;
    if (a.channels != nullptr && column < channels)
      state = a.channels + static_cast<int64_t>(index) * channels + column;
    if (a.by_head != nullptr && column >= channels)
      state = a.by_head + static_cast<int64_t>(index) * a.heads + column - channels;
    if (state != nullptr) before = *state;
  }
  parts[part * kScanColumns + lane] = some;
  __syncthreads();  // all threads read the state before one replaces it
  if (column >= a.size) return;
  for (int earlier = 0; earlier < part; ++earlier) before += parts[earlier * kScanColumns + lane];
  if (part == kScanParts - 1) {
    sums[static_cast<int64_t>(a.nchunks) * a.size] = static_cast<float>(before + some);
    if (state != nullptr) *state = before + some;
  }
  if (a.scan == TssaScan::total) return;
#pragma unroll 8
  for (int chunk = first; chunk < last; ++chunk) {
    const float own = place(chunk);
    place(chunk) = static_cast<float>(before);
    before += own;
  }
}

}  // namespace crate_kernels
