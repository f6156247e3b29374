// The number of new tokens that fit into a cache.
#pragma once

#include "../../common/cuda/device.cuh"

namespace crate_kernels {

struct CacheSpace {
  int held, appended;  // tokens in the cache, and new ones that fit behind them
};

// New tokens beyond the capacity are dropped: they are never written, and no token sees them. `keep` (batch, count) is
// right-padded, so that its kept tokens come first; null keeps all. Every lane of a warp takes part.
CRATE_DEVICE CacheSpace space_of(int length, const bool* keep, int batch, int count, int capacity) {
  const int held = length < 0 ? 0 : length < capacity ? length : capacity;
  int kept = count;
  if (keep != nullptr) {
    kept = 0;
    for (int n = threadIdx.x % kWarp; n < count; n += kWarp) kept += keep[static_cast<int64_t>(batch) * count + n];
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) kept += __shfl_xor_sync(kAllLanes, kept, step);
  }
  const int free = capacity - held;
  return {held, kept < free ? kept : free};
}

}  // namespace crate_kernels
