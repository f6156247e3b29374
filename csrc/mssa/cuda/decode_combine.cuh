// The kernels around a pass over a cache: combine stretches, append tokens, advance lengths.
#pragma once

#include "decode.cuh"

namespace crate_kernels::decoding {

CRATE_DEVICE void advance(const mssa::Problem& c, const Head& head) {
  const CacheSpace space = space_of(c, head);
  if (threadIdx.x == 0) c.held[head.sequence] = space.held + space.appended;
}

// Write out and lse of one new token of one head from the stretches; a sequence's first block advances its length.
template <class T>
__global__ void __launch_bounds__(256) mssa_decode_combine_kernel(Step c) {
  const int token = blockIdx.x % c.seqlen;
  const Head head(c, blockIdx.x / c.seqlen);
  const int64_t first = head.row * c.splits + token;
  float largest = -INFINITY, sum = 0.0f, out = 0.0f;
  for (int n = 0; n < c.splits; ++n) largest = fmaxf(largest, c.statistics[2 * (first + n * c.seqlen)]);
  const float base = Attention<1>::finite(largest);
  const int d = threadIdx.x;
  for (int n = 0; n < c.splits; ++n) {
    const int64_t row = first + n * c.seqlen;
    const float share = expf(c.statistics[2 * row] - base);
    sum += c.statistics[2 * row + 1] * share;
    if (d < c.access.head_dim) out += c.part[row * c.access.head_dim + d] * share;
  }
  const bool empty = sum == 0.0f;
  if (d < c.access.head_dim) {
    const View<T> to = head.view<T>(c, c.out);
    to.data[token * to.row + d * to.channel] = from_float<T>(empty ? 0.0f : out / sum);
  }
  if (d == 0 && c.lse != nullptr) c.lse[head.row + token] = empty ? -INFINITY : largest + logf(sum);
  if (head.head == 0 && token == 0 && threadIdx.x < kWarp) advance(c, head);
}

// Copy the new tokens of a head to the cache and leave the lengths as they are; blocks take `kThreads` tokens each.
template <class T>
__global__ void __launch_bounds__(kThreads) mssa_append_kernel(mssa::Problem c) {
  const Head head(c, blockIdx.x / c.blocks);
  const int start = blockIdx.x % c.blocks * kThreads;
  const CacheSpace space = space_of(c, head);
  const View<T> w = head.view<T>(c, c.w), cache = head.view<T>(c, c.keys);
  const int rows = space.appended - start < kThreads ? space.appended - start : kThreads;
  for (int n = threadIdx.x; n < rows * c.access.head_dim; n += kThreads) {
    const int64_t row = start + n / c.access.head_dim, d = n % c.access.head_dim;
    cache.data[(space.held + row) * cache.row + d * cache.channel] = w.data[row * w.row + d * w.channel];
  }
}

// Advance the lengths, one warp per sequence.
__global__ void __launch_bounds__(kWarp) mssa_advance_kernel(mssa::Problem c) {
  advance(c, Head(c, blockIdx.x * c.nheads));
}

}  // namespace crate_kernels::decoding
