// Decoding: a few new tokens of one head against its cached ones. Each cached row is read once for each new
// token and serves as key and as value; what limits a step is the memory that the cache is read from.
#pragma once

#include "../common/convert.h"
#include "kernels.h"

namespace {

using crate_kernels::MssaDecode;
using crate_kernels::MssaProblem;

constexpr int kDecodeBlock = 16;

void mssa_decode(const MssaProblem& p, const MssaDecode& d) {
  const int64_t item = crate_kernels::itemsize(p.dtype);
  const int width = static_cast<int>((p.head_dim + kLanes - 1) / kLanes * kLanes);
  const float factor = static_cast<float>(p.scale * 1.4426950408889634);
  alignas(64) float query[256] = {}, rows[kDecodeBlock][256] = {}, out[256], scores[kDecodeBlock];
  for (int64_t i = 0; i < d.new_tokens; ++i) {
    read_row(static_cast<char*>(d.w.data) + i * d.w.token_stride * item, p.dtype, d.w.dim_stride, p.head_dim, query);
    for (int c = 0; c < width; ++c) out[c] = 0.0f;
    float largest = -INFINITY, total = 0.0f;
    for (int first = 0; first < d.visible[i]; first += kDecodeBlock) {
      const int count = d.visible[i] - first < kDecodeBlock ? d.visible[i] - first : kDecodeBlock;
      const float* row[kDecodeBlock];
      float block_largest = largest;
      for (int n = 0; n < count; ++n) {
        const char* const key = static_cast<char*>(d.keys.data) + (first + n) * d.keys.token_stride * item;
        // fp32 rows of whole vectors need no staging.
        const bool direct = p.dtype == Dtype::f32 && d.keys.dim_stride == 1 && p.head_dim == width;
        if (!direct) read_row(key, p.dtype, d.keys.dim_stride, p.head_dim, rows[n]);
        row[n] = direct ? reinterpret_cast<const float*>(key) : rows[n];
        Vf dot = {};
        for (int c = 0; c < width; c += kLanes) dot += load(query + c) * load(row[n] + c);
        scores[n] = factor * sum(dot);
        block_largest = scores[n] > block_largest ? scores[n] : block_largest;
      }
      const float rescale = exp2f(largest - block_largest);
      largest = block_largest;
      total *= rescale;
      for (int n = 0; n < count; ++n) {
        scores[n] = exp2f(scores[n] - largest);
        total += scores[n];
      }
      for (int c = 0; c < width; c += kLanes) {
        Vf acc = load(out + c) * rescale;
        for (int n = 0; n < count; ++n) acc += load(row[n] + c) * scores[n];
        store(out + c, acc);
      }
    }
    const float inverse = d.visible[i] > 0 ? 1.0f / total : 0.0f;
    for (int c = 0; c < width; ++c) out[c] *= inverse;
    write_row(static_cast<char*>(d.out.data) + i * d.out.token_stride * item, p.dtype, d.out.dim_stride, p.head_dim,
              out);
    if (d.lse != nullptr) d.lse[i] = d.visible[i] > 0 ? (log2f(total) + largest) * 0.693147181f : -INFINITY;
  }
}

}  // namespace
