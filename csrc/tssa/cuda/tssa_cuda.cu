// The CUDA ops of token statistics. One file for both forms: half of the time it takes to compile is PyTorch's headers.
#include "../../common/box.h"
#include "causal_launch.cuh"
#include "full_launch.cuh"

namespace crate_kernels {
namespace {

TssaForm choose(bool causal, TssaProblem& p, const Tensor& w, const Tensor* dout, int32_t device) {
  return causal ? tssa_causal::choose(p, w, dout, device) : tssa_full::choose(p, w, dout, device);
}

// Number of chunks per sequence. 0: a sequence is not cut. -1: the device has no room for its tokens.
int64_t chunks(bool causal, Tensor w, std::optional<Tensor> dout, std::optional<Tensor> cu_seqlens,
               int64_t max_seqlen) {
  const Given given("tssa", device_type(), "w", w);
  const TssaCall call = {std::nullopt, cu_seqlens, max_seqlen};
  given.rank("w", w, call.packed() ? 3 : 4);
  given.options({}, cu_seqlens, {}, 0, 0);
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaProblem p = tssa_problem(w, call);
  const TssaForm form = choose(causal, p, w, dout.has_value() ? &*dout : nullptr, device);
  return form.fits ? form.cuts : -1;
}

void check_fits(const TssaForm& form, const TssaProblem& p) {
  STD_TORCH_CHECK(form.fits, "nheads * head_dim = ", p.width, " needs ", form.shared_bytes,
                  " bytes of shared memory, more than this device has");
}

void forward(const TssaForwardArgs& t) {
  check_tssa_forward(device_type(), t);
  const int32_t device = t.w.get_device_index();
  const OnDevice on(device);
  TssaForward f = tssa_forward(t);
  const TssaForm form = choose(t.causal, f.problem, t.w, nullptr, device);
  check_fits(form, f.problem);
  if (form.cuts > 0) {
    check_sums("sums_1", t.sums_1, t.w, f.problem, f.problem.width + f.problem.nheads);
    check_sums("sums_2", t.sums_2, t.w, f.problem, f.problem.width + f.problem.nheads);
  }
  (t.causal ? tssa_causal::forward : tssa_full::forward)(f, form, form.launch(f.problem, device));
}

void backward(const TssaBackwardArgs& t) {
  const auto [given, extent] = check_tssa_backward(device_type(), t);
  given.numbers("dtemp", t.dtemp, {extent.sequences, extent.nheads});
  const int32_t device = t.w.get_device_index();
  const OnDevice on(device);
  TssaBackward b = tssa_backward(t);
  const TssaProblem& p = b.problem;
  const TssaForm form = choose(t.causal, b.problem, t.w, &t.dout, device);
  check_fits(form, p);
  if (form.cuts > 0) {
    check_sums("sums_1", t.sums_1, t.w, p, (t.causal ? 2 : 1) * p.width + p.nheads);
    check_sums("sums_2", t.sums_2, t.w, p, p.width + p.nheads);
    if (t.causal) check_sums("sums_3", t.sums_3, t.w, p, p.width + p.nheads);
  }
  STD_TORCH_CHECK(t.dtemp.has_value() || (t.causal && form.cuts > 0), "dtemp must be given unless sums_3 ends in it");
  STD_TORCH_CHECK(t.dlogit.has_value() || form.cluster > 0, "dlogit must be given unless a sequence is on chip");
  const Launch l = form.launch(p, device);
  t.causal ? tssa_causal::backward(b, form, l, tssa_floats(t.ddenom_bias)) : tssa_full::backward(b, form, l);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cuda_tssa_chunks(bool causal, Tensor w, Tensor? dout, Tensor? cu_seqlens, int max_seqlen) -> int");
  m.def("cuda_" CRATE_TSSA_FWD);
  m.def("cuda_" CRATE_TSSA_BWD);
}

CRATE_IMPLEMENT(m) {
  m.impl("cuda_tssa_chunks", CRATE_BOX(&chunks));
  m.impl("cuda_tssa_fwd", CRATE_BOX(&forward));
  m.impl("cuda_tssa_bwd", CRATE_BOX(&backward));
}

}  // namespace crate_kernels
