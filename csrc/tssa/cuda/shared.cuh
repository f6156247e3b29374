// The layout of a block's shared memory. crate_kernels/ops/tssa/cuda/forms.py has the same sizes.
#pragma once

#include "call.cuh"

namespace crate_kernels {

// Pieces of shared memory, each aligned to 16 bytes.
struct TssaShared {
  int64_t bytes = 0;

  template <class T>
  CRATE_DEVICE int64_t take(int64_t count) {
    const int64_t at = bytes;
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return at;
  }
};

template <class T>
CRATE_DEVICE T* shared_at(int64_t offset) {
  return reinterpret_cast<T*>(shared_memory() + offset);
}

// Bytes for sums over columns (8 floats per thread) or for the logits of tokens (nheads doubles per warp).
CRATE_DEVICE int64_t tssa_scratch(const TssaProblem& p, int threads) {
  const int64_t columns = int64_t{threads} * 32, logits = int64_t{threads} / 32 * p.nheads * 8;
  return columns > logits ? columns : (logits + 15) / 16 * 16;
}

// Numbers per channel that the forward divides by.
CRATE_DEVICE int64_t tssa_reciprocals(const TssaProblem& p) {
  return p.dtype == Dtype::f32 ? 2 : 1;
}

// On chip: tensors of `rows` tokens, numbers per head and token, and sums by channel and head.
struct TssaResident {
  int64_t tokens[2], by_head[2], first, second, channels, heads, scratch, bytes;

  CRATE_DEVICE TssaResident(const TssaProblem& p, int rows, int threads, bool backward) {
    const int copies = backward ? 2 : 1;
    TssaShared s;
    for (int i = 0; i < 2; ++i)
      tokens[i] = s.take<char>(i < copies ? p.itemsize() * rows * p.width : 0);  // (rows, width)
    for (int i = 0; i < 2; ++i)
      by_head[i] = s.take<float>(i < copies ? int64_t{rows} * p.nheads : 0);  // (rows, nheads)
    first = s.take<float>(p.width + p.nheads);
    second = s.take<float>(p.width + p.nheads);
    channels = s.take<float>((backward ? 2 : tssa_reciprocals(p)) * p.width);
    heads = s.take<float>(p.nheads);
    scratch = s.take<char>(tssa_scratch(p, threads));
    bytes = s.bytes;
  }
};

}  // namespace crate_kernels
