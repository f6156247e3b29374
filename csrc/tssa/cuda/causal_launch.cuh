// Cuts a call of the causal form into chunks, and launches it.
#pragma once

#include "causal_backward_steps.cuh"
#include "causal_forward.cuh"
#include "host.cuh"

namespace crate_kernels {
namespace tssa_causal {

template <class F>
void with_access(const TssaProblem& p, bool vectors, F&& f) {
  vectors ? f(TssaFours{{p.dtype}}) : f(TssaScalars{p.dtype});
}

// Cuts sequences into chunks. A sequence stays one chunk if it is short, or, in the forward, if there are enough
// sequences to fill the device.
inline TssaForm choose(TssaProblem& p, const Tensor& w, const Tensor* dout, int32_t device) {
  TssaForm form;
  if (p.width == 0) return form;
  form.vectors = tssa_vectors(w, dout, TssaFours::kCount);
  const int count = form.vectors ? TssaFours::kCount : 1, limit = shared_limit(device);
  form.threads = std::clamp((p.width / count + 31) / 32 * 32, 64, dout == nullptr ? 512 : 256);
  if (dout == nullptr) {
    const bool many = int64_t{p.nsequences} * form.threads / 32 >= 16 * multiprocessors(device);
    // A block adds up its tokens one after the other, and each addition rounds.
    cut_in_chunks(p, std::min(p.seqlen, many ? 1024 : 64));
    form.shared_bytes = TssaCausalShared(p, count).bytes;
  } else {
    // Short chunks keep no running sums: they serve tokens that are too wide for long chunks.
    for (const int chunk : {32, kBackMark}) {
      cut_in_chunks(p, std::min(p.seqlen, chunk));
      form.shared_bytes = TssaCausalBackwardShared(p, count, true).bytes;
      if (form.shared_bytes <= limit) break;
    }
  }
  form.cuts = p.nchunks > 1 ? p.nchunks : 0;
  form.fits = form.shared_bytes <= limit;
  return form;
}

inline void forward(const TssaForward& f, const TssaForm& form, const Launch& l) {
  const TssaProblem& p = f.problem;
  with_access(p, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if (form.cuts == 0) return launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    const int64_t size = p.width + p.nheads;
    Launch by_thread = l;  // without shared memory
    by_thread.shared_bytes = 0;
    launch<tssa_causal_fwd_energy_kernel<Access>>(by_thread, f, access);
    scan_chunks(p, f.sums_1, size, TssaScan::before, l.stream, f.state_energy);
    launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    scan_chunks(p, f.sums_2, size, TssaScan::before, l.stream, f.state_moment, f.state_mass);
    launch<tssa_causal_fwd_output_kernel<Access>>(by_thread, f, access);
  });
}

template <TssaCausalBackwardStep step, class Access>
void backward_step(const TssaBackward& b, const Access& access, Launch l) {
  constexpr int count = Access::kCount;
  if (step == TssaCausalBackwardStep::totals) l.shared_bytes = 0;
  if (step == TssaCausalBackwardStep::dmoment) l.shared_bytes = b.problem.width / count * sizeof(float);
  if (step == TssaCausalBackwardStep::dw) l.shared_bytes = TssaCausalBackwardShared(b.problem, count, false).bytes;
  launch<tssa_causal_bwd_kernel<Access, step>>(l, b, access);
}

inline void backward(const TssaBackward& b, const TssaForm& form, const Launch& l, float* dbias) {
  const TssaProblem& p = b.problem;
  with_access(p, form.vectors, [&](auto access) {
    const int64_t size = p.width + p.nheads;
    if (form.cuts > 0) {
      backward_step<TssaCausalBackwardStep::totals>(b, access, l);
      scan_chunks(p, b.sums_1, size + p.width, TssaScan::before, l.stream);
      backward_step<TssaCausalBackwardStep::dmoment>(b, access, l);
      scan_chunks(p, b.sums_2, size, TssaScan::behind, l.stream);
    }
    backward_step<TssaCausalBackwardStep::dlogit>(b, access, l);
    if (form.cuts > 0) scan_chunks(p, b.sums_3, size, TssaScan::behind, l.stream);
    backward_step<TssaCausalBackwardStep::dw>(b, access, l);
  });
  if (dbias == nullptr) return;
  const int64_t places = p.nheads * b.bias_tokens;
  launch<tssa_causal_dbias_kernel<>>({(places + 255) / 256, 256, 0, 1, l.stream}, b, dbias);
}

}  // namespace tssa_causal
}  // namespace crate_kernels
