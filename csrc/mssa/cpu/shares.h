// The shares of dw that the parts of a backward accumulate, and their sum.
#pragma once

#include "head.h"

namespace {

// Cuts the memory of one part of the gradient of `tokens` tokens.
CRATE_INLINE MssaShares shares(const MssaProblem& p, int64_t tokens, float* memory) {
  return {memory, memory + round_up(tokens, kTile) * padded_dim(p.head_dim)};
}

// Sum the parts of tokens [begin, end), which are the head's keys, and write them.
void mssa_combine(const MssaProblem& p, const MssaHead& head, int parts, const float* partial, int64_t begin,
                  int64_t end) {
  const int64_t size = crate_kernels::mssa_partial_size(head.nkeys, p.head_dim);
  const int width = padded_dim(p.head_dim);
  int64_t rank = 0;
  for (int64_t t = 0; t < begin; ++t) rank += KeyList::is_key(head, t);
  for (int64_t t = begin; t < end; ++t) {
    const bool is_key = KeyList::is_key(head, t);
    alignas(64) float row[256] = {};
    for (int part = 0; part < parts; ++part) {
      const MssaShares s = shares(p, head.nkeys, const_cast<float*>(partial) + part * size);
      for (int d = 0; d < width; d += kLanes) {
        Vf total = load(row + d) + load(s.as_query + t * width + d);
        if (is_key) total += load(s.as_key + rank * width + d);
        store(row + d, total);
      }
    }
    rank += is_key;
    write_row(element(head.dw, t, p.result), p.result, head.dw.dim_stride, p.head_dim, row);
  }
}

}  // namespace
