// Subspace attention over a cache on several threads.
#include "../../../csrc/mssa/cpu/decode_cpu.cpp"
#include "cases.h"

namespace crate_kernels {
namespace {

void run_decode(ScalarType dtype, int64_t nheads, int64_t cached, int64_t tokens, bool padded) {
  const int64_t batch = 2, head_dim = 20, capacity = cached + tokens;
  const Tensor w = Tensor::numbers(dtype, {batch, tokens, nheads, head_dim}).transposed(1, 2);
  const Tensor data = Tensor::numbers(dtype, {batch, nheads, capacity, head_dim});
  const int32_t length = static_cast<int32_t>(cached);
  const Tensor lengths = Tensor::of<int32_t>(ScalarType::Int, {batch}, {length, length / 2});
  const Tensor out(dtype, {batch, nheads, tokens, head_dim}), lse(ScalarType::Float, {batch, nheads, tokens});
  MssaDecodeCall call = {{}, capacity, false, 0.3, true};
  if (padded) call.key_padding_mask = Tensor(ScalarType::Bool, {batch, tokens});  // none of them is kept
  decode(w, data, lengths, call, out, lse);
}

}  // namespace
}  // namespace crate_kernels

void run_mssa_decode(ScalarType dtype) {
  using namespace crate_kernels;
  for (const int64_t tokens : {1, 5, 20}) {
    run_decode(dtype, 3, 100, tokens, false);
    run_decode(dtype, 1, 1100, tokens, true);  // a cache read in parts
  }
}
