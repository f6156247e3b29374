// The passes of sparse coding on several threads. ista and ista_overcomplete are made of them and of PyTorch's
// products.
#include "../../../csrc/ista/cpu/ista_cpu.cpp"
#include "cases.h"

void run_ista(ScalarType dtype) {
  using namespace crate_kernels;
  const int64_t rows = 500, dim = 200;  // several tasks
  const Tensor x = Tensor::numbers(dtype, {rows, dim}), product = Tensor::numbers(ScalarType::Float, {rows, dim});
  const Tensor out(dtype, {rows, dim});
  for (const bool nonnegative : {true, false}) {
    update(product, x, {}, 0.1, 0.01, nonnegative, out);       // ista
    update(product, {}, {}, 0.1, 0.01, nonnegative, product);  // first step of ista_overcomplete, in place
    update(x, product, out, -0.1, 0.0, nonnegative, out);      // backward: the gate is the output
  }
  const Tensor a = Tensor::numbers(ScalarType::Float, {dim, dim}), b = Tensor::numbers(ScalarType::Float, {dim, dim});
  subtract_symmetric(a, b, Tensor(dtype, {dim, dim}));
  subtract_symmetric(a, b, a);
  add_transposed(a, Tensor(dtype, {dim, dim}));
  transpose(product, Tensor(ScalarType::Float, {dim, rows}));
}
