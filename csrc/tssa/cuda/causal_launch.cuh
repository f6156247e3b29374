// Cuts a call of the causal form into chunks, and launches it.
#pragma once

#include "causal_backward_steps.cuh"
#include "causal_forward.cuh"
#include "host.cuh"

namespace crate_kernels {
namespace tssa_causal {

// Threads per block, and whether the device has the shared memory for it.
struct Form {
  int threads = 0;
  int64_t shared_bytes = 0;
  bool vectors = false, fits = false;
};

template <class F>
void with_access(const TssaProblem& p, bool vectors, F&& f) {
  vectors ? f(TssaFours(p.dtype)) : f(TssaScalars(p.dtype));
}

inline void cut(TssaProblem& p, int chunk_size) {
  p.chunk_size = std::max(chunk_size, 1);
  p.nchunks = std::max(1, (p.seqlen + p.chunk_size - 1) / p.chunk_size);
}

// Cuts sequences into chunks. A sequence stays one chunk if it is short, or, in the forward, if there are enough
// sequences to fill the device.
inline Form choose(TssaProblem& p, const Tensor& w, const Tensor* dout, int32_t device) {
  Form form;
  if (p.width == 0) return form;
  form.vectors = tssa_vectors(w, TssaFours::kCount) && (dout == nullptr || tssa_vectors(*dout, TssaFours::kCount));
  const int count = form.vectors ? TssaFours::kCount : 1, limit = shared_limit(device);
  form.threads = std::clamp((p.width / count + 31) / 32 * 32, 64, dout == nullptr ? 512 : 256);
  if (dout == nullptr) {
    const bool many = int64_t{p.nsequences} * form.threads / 32 >= 16 * multiprocessors(device);
    cut(p, many ? p.seqlen : std::min(p.seqlen, 64));
    form.shared_bytes = TssaCausalShared(p, count).bytes;
  } else {
    // Short chunks keep no running sums: they serve tokens that are too wide for long chunks.
    for (const int chunk : {32, kBackMark}) {
      cut(p, std::min(p.seqlen, chunk));
      form.shared_bytes = TssaCausalBackwardShared(p, count, true).bytes;
      if (form.shared_bytes <= limit) break;
    }
  }
  form.fits = form.shared_bytes <= limit;
  return form;
}

// Number of chunks per sequence. 0: a sequence is one chunk. -1: the device has no room for its tokens.
inline int64_t chunks(Tensor w, std::optional<Tensor> dout, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  TssaProblem p = tssa_problem(w, {std::nullopt, cu_seqlens, max_seqlen});
  const Form form = choose(p, w, dout.has_value() ? &*dout : nullptr, w.get_device_index());
  return !form.fits ? -1 : p.nchunks > 1 ? p.nchunks : 0;
}

inline void check_fits(const Form& form, const TssaProblem& p) {
  STD_TORCH_CHECK(form.fits, "nheads * head_dim = ", p.width, " needs ", form.shared_bytes,
                  " bytes of shared memory, more than this device has");
}

inline void run_forward(const Tensor& w, const Tensor& temp, const std::optional<Tensor>& denom_bias,
                        const TssaCall& call, const Tensor& out, const Tensor& membership,
                        const std::optional<Tensor>& sums_1, const std::optional<Tensor>& sums_2,
                        const TssaState& state) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaCausal f = {};
  f.problem = tssa_problem(w, call);
  f.problem.temp = tssa_floats(temp);
  const TssaProblem& p = f.problem;
  const Form form = choose(f.problem, w, nullptr, device);
  check_fits(form, p);
  f.w = tssa_tokens(w, call.packed());
  f.out = tssa_tokens(out, call.packed());
  f.membership = tssa_floats(membership);
  f.bias = tssa_floats(denom_bias);
  f.bias_tokens = denom_bias.has_value() ? denom_bias->size(1) : 0;
  f.sums_1 = tssa_floats(sums_1);
  f.sums_2 = tssa_floats(sums_2);
  f.state = state;
  const Launch l = {int64_t{p.nsequences} * p.nchunks, form.threads, form.shared_bytes, 1, current_stream(device)};
  with_access(p, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if (p.nchunks == 1) return launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    const int64_t size = p.width + p.nheads;
    check_sums("sums_1", sums_1, p, size);
    check_sums("sums_2", sums_2, p, size);
    Launch by_thread = l;  // without shared memory
    by_thread.shared_bytes = 0;
    launch<tssa_causal_fwd_energy_kernel<Access>>(by_thread, f, access);
    scan_chunks(p, f.sums_1, size, TssaScan::before, l.stream, state.energy);
    launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    scan_chunks(p, f.sums_2, size, TssaScan::before, l.stream, state.weighted, state.mass);
    launch<tssa_causal_fwd_output_kernel<Access>>(by_thread, f, access);
  });
}

inline void forward(Tensor w, Tensor temp, std::optional<Tensor> denom_bias, TssaCall call, Tensor out,
                    Tensor membership, std::optional<Tensor> sums_1, std::optional<Tensor> sums_2) {
  run_forward(w, temp, denom_bias, call, out, membership, sums_1, sums_2, {});
}

inline void decode(Tensor w, Tensor temp, std::optional<Tensor> denom_bias, Tensor energy, Tensor weighted, Tensor mass,
                   Tensor lengths, std::optional<Tensor> key_padding_mask, Tensor out, Tensor membership,
                   std::optional<Tensor> sums_1, std::optional<Tensor> sums_2) {
  const TssaState state = {tssa_floats(energy), tssa_floats(weighted), tssa_floats(mass),
                           static_cast<int32_t*>(lengths.data_ptr())};
  run_forward(w, temp, denom_bias, {key_padding_mask}, out, membership, sums_1, sums_2, state);
}

template <TssaCausalBackwardStep step, class Access>
void backward_step(const TssaCausalBackward& b, const Access& access, Launch l) {
  constexpr int count = Access::kCount;
  if (step == TssaCausalBackwardStep::totals) l.shared_bytes = 0;
  if (step == TssaCausalBackwardStep::dmoment) l.shared_bytes = b.problem.width / count * sizeof(float);
  if (step == TssaCausalBackwardStep::dw) l.shared_bytes = TssaCausalBackwardShared(b.problem, count, false).bytes;
  launch<tssa_causal_bwd_kernel<Access, step>>(l, b, access);
}

inline void backward(Tensor dout, std::optional<Tensor> dmembership, Tensor w, Tensor temp,
                     std::optional<Tensor> denom_bias, Tensor membership, TssaCall call, Tensor dw,
                     std::optional<Tensor> dtemp, std::optional<Tensor> ddenom_bias, Tensor dlogit,
                     std::optional<Tensor> totals, std::optional<Tensor> dmoments, std::optional<Tensor> denergies) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaCausalBackward b = {};
  b.problem = tssa_problem(w, call);
  b.problem.temp = tssa_floats(temp);
  const TssaProblem& p = b.problem;
  const Form form = choose(b.problem, w, &dout, device);
  check_fits(form, p);
  b.w = tssa_tokens(w, call.packed());
  b.dout = tssa_tokens(dout, call.packed());
  b.dw = tssa_tokens(dw, call.packed());
  b.membership = tssa_floats(membership);
  b.dmembership = tssa_floats(dmembership);
  b.bias = tssa_floats(denom_bias);
  b.bias_tokens = denom_bias.has_value() ? denom_bias->size(1) : 0;
  b.dlogit = tssa_floats(dlogit);
  b.dtemp = tssa_floats(dtemp);
  b.totals = tssa_floats(totals);
  b.dmoments = tssa_floats(dmoments);
  b.denergies = tssa_floats(denergies);
  const Launch l = {int64_t{p.nsequences} * p.nchunks, form.threads, form.shared_bytes, 1, current_stream(device)};
  with_access(p, form.vectors, [&](auto access) {
    const int64_t size = p.width + p.nheads;
    if (p.nchunks > 1) {
      check_sums("totals", totals, p, size + p.width);
      check_sums("dmoments", dmoments, p, size);
      check_sums("denergies", denergies, p, size);
      backward_step<TssaCausalBackwardStep::totals>(b, access, l);
      scan_chunks(p, b.totals, size + p.width, TssaScan::before, l.stream);
      backward_step<TssaCausalBackwardStep::dmoment>(b, access, l);
      scan_chunks(p, b.dmoments, size, TssaScan::behind, l.stream);
    } else {
      STD_TORCH_CHECK(dtemp.has_value() && !totals.has_value(), "dtemp must be given where a sequence is one chunk");
    }
    backward_step<TssaCausalBackwardStep::dlogit>(b, access, l);
    if (p.nchunks > 1) scan_chunks(p, b.denergies, size, TssaScan::behind, l.stream);
    backward_step<TssaCausalBackwardStep::dw>(b, access, l);
  });
  if (ddenom_bias.has_value()) {
    const int64_t places = p.nheads * b.bias_tokens;
    launch<tssa_causal_dbias_kernel<>>({(places + 255) / 256, 256, 0, 1, l.stream}, b, tssa_floats(ddenom_bias));
  }
}

}  // namespace tssa_causal
}  // namespace crate_kernels
