// The kernels around a pass over a cache: combine stretches, append tokens, advance lengths.
#pragma once

#include "decode.cuh"

namespace crate_kernels {
namespace decoding {

CRATE_DEVICE void advance(const Step& c, int batch) {
  const CacheSpace space = space_of(c.lengths[batch], c.keep, batch, c.count, c.capacity);
  if (threadIdx.x == 0) c.lengths[batch] = space.held + space.appended;
}

// Write out and lse of one new token of one head from the stretches; a sequence's first block advances its length.
template <class T>
__global__ void __launch_bounds__(256) mssa_decode_combine_kernel(Step c) {
  const int token = blockIdx.x % c.count, head = blockIdx.x / c.count, batch = head / c.nheads;
  const int64_t first = static_cast<int64_t>(head) * c.splits * c.count + token;
  float largest = -INFINITY, sum = 0.0f, out = 0.0f;
  for (int n = 0; n < c.splits; ++n) largest = fmaxf(largest, c.statistics[2 * (first + n * c.count)]);
  const float base = Attention<1>::finite(largest);
  const int d = threadIdx.x;
  for (int n = 0; n < c.splits; ++n) {
    const int64_t row = first + n * c.count;
    const float share = expf(c.statistics[2 * row] - base);
    sum += c.statistics[2 * row + 1] * share;
    if (d < c.head_dim) out += c.part[row * c.head_dim + d] * share;
  }
  const bool empty = sum == 0.0f;
  if (d < c.head_dim) {
    const Tokens<T> to = tokens_of<T>(c.out, batch, head % c.nheads);
    to.data[token * to.row + d * to.channel] = from_float<T>(empty ? 0.0f : out / sum);
  }
  if (d == 0 && c.lse != nullptr) {
    c.lse[static_cast<int64_t>(head) * c.count + token] = empty ? -INFINITY : largest + logf(sum);
  }
  if (head % c.nheads == 0 && token == 0 && threadIdx.x < kWarp) advance(c, batch);
}

// Copy the new tokens of a head to the cache and leave the lengths as they are; blocks take `kThreads` tokens each.
template <class T>
__global__ void __launch_bounds__(kThreads) mssa_append_kernel(Step c) {
  const int head = blockIdx.x / c.groups, start = blockIdx.x % c.groups * kThreads, batch = head / c.nheads;
  const CacheSpace space = space_of(c.lengths[batch], c.keep, batch, c.count, c.capacity);
  const Tokens<T> w = tokens_of<T>(c.w, batch, head % c.nheads), cache = tokens_of<T>(c.cache, batch, head % c.nheads);
  const int rows = space.appended - start < kThreads ? space.appended - start : kThreads;
  for (int n = threadIdx.x; n < rows * c.head_dim; n += kThreads) {
    const int64_t row = start + n / c.head_dim, d = n % c.head_dim;
    cache.data[(space.held + row) * cache.row + d * cache.channel] = w.data[row * w.row + d * w.channel];
  }
}

// Advance the lengths, one warp per sequence.
__global__ void __launch_bounds__(kWarp) mssa_advance_kernel(Step c) {
  advance(c, blockIdx.x);
}

}  // namespace decoding
}  // namespace crate_kernels
