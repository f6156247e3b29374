// The gradient of the bias of the causal form.
#pragma once

#include "call.cuh"

namespace crate_kernels {

// ddenom_bias = head_dim temp_h sum_b dlogit: one thread per position and head, the sequences in their order.
__global__ void __launch_bounds__(256) tssa_causal_dbias_kernel(TssaBackward b, float* dbias) {
  const TssaProblem& p = b.problem;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (place >= p.nheads * b.bias_tokens) return;
  const int h = static_cast<int>(place / b.bias_tokens);
  const int64_t n = place - h * b.bias_tokens;
  double total = 0.0;
  for (int index = 0; index < p.nsequences; ++index) {
    const TssaSpan s = sequence_of(p, index);
    if (n < s.count) total += rows_of(p, b.dlogit, s)(static_cast<int>(n), h);
  }
  dbias[place] = static_cast<float>(static_cast<double>(p.head_dim) * p.temp[h] * total);
}

}  // namespace crate_kernels
