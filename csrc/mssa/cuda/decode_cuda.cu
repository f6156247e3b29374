// The launches of decoding: append new tokens to a cache and attend over it, without waiting for the device.
#include "decode.cuh"
#include "host.cuh"

namespace crate_kernels::decoding {
namespace {

// Tokens per block, if a block has several: _GROUP of native.py.
constexpr int kGroup = 4;

// Blocks per head that take `tokens` new tokens each.
int blocks_of(const mssa::Problem& c, int tokens) {
  return (c.seqlen + tokens - 1) / tokens;
}

template <class T, int VECTORS>
void launch_decode(Step c, int32_t device) {
  const int tokens = c.seqlen == 1 ? 1 : kGroup;
  Launch l = launch_of(c, blocks_of(c, tokens), kThreads, decode_shared(tokens, c.access.head_dim), device);
  l.grid *= c.splits;
  if (tokens == 1) {
    launch<mssa_decode_kernel<T, 1, VECTORS>>(l, c);
  } else {
    launch<mssa_decode_kernel<T, kGroup, VECTORS>>(l, c);
  }
}

}  // namespace

void step(const mssa::Problem& problem, const Tensor& part, const Tensor& statistics, int32_t device) {
  Step c = {problem, static_cast<float*>(part.data_ptr()), static_cast<float*>(statistics.data_ptr()),
            static_cast<int>(part.size(1)), 1};
  const int head_dim = c.access.head_dim;
  STD_TORCH_CHECK(c.w.wide && c.keys.wide, "tokens must be rows of whole 16 bytes, got head_dim ", head_dim);
  with_dtype(c.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int packs = (head_dim + Pack<T>::kCount - 1) / Pack<T>::kCount;
    while (c.lanes < packs && c.lanes < static_cast<int>(kWarp)) c.lanes *= 2;
    constexpr int kMostVectors = sizeof(T) == 4 ? 2 : 1;  // 256 halves are one pack per lane
    if (packs > c.lanes) {
      launch_decode<T, kMostVectors>(c, device);
    } else {
      launch_decode<T, 1>(c, device);
    }
    constexpr int kLanes = kWarp;
    const Launch l = launch_of(c, c.seqlen, (head_dim + kLanes - 1) / kLanes * kLanes, 0, device);
    launch<mssa_decode_combine_kernel<T>>(l, c);
  });
}

void append(mssa::Problem c, int32_t device) {
  const Launch l = launch_of(c, blocks_of(c, kThreads), kThreads, 0, device);
  with_dtype(c.dtype, [&](auto zero) { launch<mssa_append_kernel<decltype(zero)>>(l, c); });
}

void advance(const mssa::Problem& c, int32_t device) {
  launch<mssa_advance_kernel>({c.sequences, static_cast<int>(kWarp), 0, 1, current_stream(device)}, c);
}

}  // namespace crate_kernels::decoding
