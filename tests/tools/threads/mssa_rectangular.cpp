// Subspace attention of one range of tokens to another on several threads, forward and backward.
#include "../../../csrc/mssa/cpu/rectangular_cpu.cpp"
#include "cases.h"

void run_mssa_rectangular(ScalarType dtype) {
  using namespace crate_kernels;
  const int64_t batch = 2, head_dim = 20, count = 100;
  for (const int64_t nheads : {1, 3}) {
    const Tensor rows = Tensor::numbers(dtype, {batch, nheads, count, head_dim});
    const Tensor others = Tensor::numbers(dtype, {batch, nheads, count + 30, head_dim});
    const Tensor lse = Tensor::numbers(ScalarType::Float, {batch, nheads, count}), delta = lse, dlse = lse;
    const Tensor other_lse = Tensor::numbers(ScalarType::Float, {batch, nheads, count + 30});
    const Tensor other_delta = other_lse, other_dlse = other_lse;
    const Tensor out(ScalarType::Float, {batch, nheads, count, head_dim}), dw = out;
    const Tensor row_lse(ScalarType::Float, {batch, nheads, count}), found(ScalarType::Float, {batch, nheads, count});
    find_delta(rows, rows, found);
    for (const bool causal : {false, true}) {
      const MssaRectangularCall call = {{}, {}, 130, 0, {causal}, 0.3, {}, 0.0, 0, nheads};
      forward(rows, others, call, out, row_lse);
      backward(rows, rows, lse, delta, dlse, others, others, other_lse, other_delta, other_dlse, call, dw);
      backward(rows, rows, lse, delta, dlse, rows, rows, lse, delta, dlse, call, dw);
    }
  }
}
