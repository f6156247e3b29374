// Token statistics on several threads: forward and backward, full and causal, padded, packed, with dropout and a bias;
// and steps of a cache.
#include "../../../csrc/tssa/cpu/tssa_cpu.cpp"
#include "cases.h"

namespace crate_kernels {
namespace {

void run(ScalarType dtype, bool causal, int64_t batch, const TssaCall& call) {
  const int64_t seqlen = 150, nheads = 3, head_dim = 20;
  const bool packed = call.packed();
  const int64_t sequences = packed ? call.cu_seqlens->size(0) - 1 : batch;
  const std::vector<int64_t> sizes =
      packed ? std::vector<int64_t>{seqlen, nheads, head_dim} : std::vector<int64_t>{batch, seqlen, nheads, head_dim};
  const auto tokens = [&](Tensor t) { return packed ? t : t.transposed(1, 2); };
  const std::vector<int64_t> rows =
      packed ? std::vector<int64_t>{nheads, seqlen} : std::vector<int64_t>{batch, nheads, seqlen};
  const Tensor temp = Tensor::numbers(ScalarType::Float, {nheads});
  std::optional<Tensor> bias, energy, moment, dbias;
  if (causal) {
    bias = Tensor::numbers(ScalarType::Float, {nheads, seqlen});
    dbias = Tensor(ScalarType::Float, {nheads, seqlen});
  } else {
    energy = Tensor(ScalarType::Float, {sequences, nheads, head_dim});
    moment = Tensor(ScalarType::Float, {sequences, nheads, head_dim});
  }
  TssaForwardArgs f = {causal,
                       tokens(Tensor::numbers(dtype, sizes)),
                       temp,
                       bias,
                       call,
                       tokens(Tensor(dtype, sizes)),
                       Tensor(ScalarType::Float, rows),
                       energy,
                       moment,
                       {},
                       {}};
  forward(f);
  TssaBackwardArgs b = {causal,
                        tokens(Tensor::numbers(dtype, sizes)),
                        Tensor::numbers(ScalarType::Float, rows),
                        f.w,
                        temp,
                        bias,
                        f.membership,
                        energy,
                        moment,
                        call,
                        tokens(Tensor(dtype, sizes)),
                        Tensor(ScalarType::Float, {nheads}),
                        dbias};
  backward(b);
}

void run_steps_of_a_cache(ScalarType dtype, int64_t batch, int64_t tokens) {
  const int64_t nheads = 3, head_dim = 20;
  const Tensor lengths = Tensor(ScalarType::Int, {batch});
  const auto state = [&](std::vector<int64_t> sizes) { return Tensor(ScalarType::Double, std::move(sizes)); };
  const TssaForwardArgs f = {true,
                             Tensor::numbers(dtype, {batch, nheads, tokens, head_dim}),
                             Tensor::numbers(ScalarType::Float, {nheads}),
                             {},
                             {},
                             Tensor(dtype, {batch, nheads, tokens, head_dim}),
                             Tensor(ScalarType::Float, {batch, nheads, tokens}),
                             state({batch, nheads, head_dim}),
                             state({batch, nheads, head_dim}),
                             state({batch, nheads}),
                             lengths};
  for (int step = 0; step < 2; ++step) {
    forward(f);
    for (int64_t b = 0; b < batch; ++b) static_cast<int32_t*>(lengths.data_ptr())[b] += static_cast<int32_t>(tokens);
  }
}

}  // namespace
}  // namespace crate_kernels

void run_tssa(ScalarType dtype) {
  using namespace crate_kernels;
  for (const int64_t batch : {1, 5}) {  // threads share a sequence, or have one each
    for (const bool causal : {false, true}) {
      run(dtype, causal, batch, {});
      TssaCall padded, packed, dropped;
      Tensor keep(ScalarType::Bool, {batch, 150});
      for (int64_t n = 0; n < keep.numel(); ++n) static_cast<bool*>(keep.data_ptr())[n] = n % 3 != 0;
      padded.key_padding_mask = keep;
      run(dtype, causal, batch, padded);
      packed.cu_seqlens = batch == 1 ? Tensor::of<int32_t>(ScalarType::Int, {3}, {0, 140, 140})
                                     : Tensor::of<int32_t>(ScalarType::Int, {6}, {0, 70, 70, 71, 130, 150});
      packed.max_seqlen = 140;
      run(dtype, causal, batch, packed);
      dropped.seed = Tensor::of<int64_t>(ScalarType::Long, {}, {1234567});
      dropped.dropout_p = 0.3;
      run(dtype, causal, batch, dropped);
    }
    for (const int64_t tokens : {1, 70}) run_steps_of_a_cache(dtype, batch, tokens);
  }
}
