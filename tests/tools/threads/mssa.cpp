// Subspace attention on several threads: forward and backward, full, causal, padded, packed, with dropout and with a
// threshold; and heads that several threads share.
#include "../../../csrc/mssa/cpu/mssa_cpu.cpp"
#include "cases.h"

namespace crate_kernels {
namespace {

void run(ScalarType dtype, int64_t nheads, const MssaCall& call) {
  const int64_t seqlen = 150, head_dim = 20;  // three tiles, and channels that do not fill a vector
  const bool packed = call.packed();
  const std::vector<int64_t> sizes =
      packed ? std::vector<int64_t>{seqlen, nheads, head_dim} : std::vector<int64_t>{2, seqlen, nheads, head_dim};
  const auto tokens = [&](Tensor t) { return packed ? t : t.transposed(1, 2); };
  const Tensor w = tokens(Tensor::numbers(dtype, sizes)), dout = tokens(Tensor::numbers(dtype, sizes));
  const Tensor out = tokens(Tensor(dtype, sizes)), dw = tokens(Tensor(dtype, sizes));
  const std::vector<int64_t> rows =
      packed ? std::vector<int64_t>{nheads, seqlen} : std::vector<int64_t>{2, nheads, seqlen};
  const Tensor lse(ScalarType::Float, rows), dlse = Tensor::numbers(ScalarType::Float, rows);
  forward(w, call, out, lse);
  backward(dout, dlse, w, out, lse, call, dw);
}

}  // namespace
}  // namespace crate_kernels

void run_mssa(ScalarType dtype) {
  using namespace crate_kernels;
  MssaCall call;
  call.scale = 0.3;
  const auto with = [&](auto change) {
    MssaCall changed = call;
    change(changed);
    for (const bool causal : {false, true}) {
      changed.mask = {causal};
      for (const int64_t nheads : {1, 3}) run(dtype, nheads, changed);  // heads in parts, heads whole
    }
  };
  with([](MssaCall&) {});
  with([](MssaCall& c) {
    Tensor keep(ScalarType::Bool, {2, 150});
    for (int64_t n = 0; n < keep.numel(); ++n) static_cast<bool*>(keep.data_ptr())[n] = n % 3 != 0 && n != 7;
    c.key_padding_mask = keep;
  });
  with([](MssaCall& c) {
    c.cu_seqlens = Tensor::of<int32_t>(ScalarType::Int, {5}, {0, 70, 70, 71, 140});
    c.max_seqlen = 70;
  });
  with([](MssaCall& c) {
    c.seed = Tensor::of<int64_t>(ScalarType::Long, {}, {1234567});
    c.dropout_p = 0.3;
  });
  with([](MssaCall& c) { c.threshold = 0.02; });
  with([](MssaCall& c) { c.scale = 30.0; });  // rows shifted by their maxima
}

void run_planted_race() {
  using namespace crate_kernels;
  const int64_t seqlen = 150, head_dim = 20;
  const Tensor w = Tensor::numbers(ScalarType::Float, {1, 1, seqlen, head_dim});
  const Tensor dout = w, out(ScalarType::Float, {1, 1, seqlen, head_dim}), dw = out,
               lse(ScalarType::Float, {1, 1, seqlen});
  MssaCall call;
  call.scale = 0.3;
  forward(w, call, out, lse);
  const MssaProblem p = problem(w, call);
  const MssaHead head = list_heads({w, out, lse, &dout, nullptr, &dw}, call)[0];
  const auto share = allocate_parts(2 * mssa_partial_size(seqlen, head_dim));
  for_each_task(2, [&](int64_t, Arena& arena) { kernels(p).backward(p, head, 0, 2, arena, share.get()); });
}
