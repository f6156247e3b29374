// The chunks of a call of the causal form, and its launches.
#pragma once

#include "causal_backward_steps.cuh"
#include "causal_forward.cuh"
#include "host.cuh"

namespace crate_kernels {
namespace tssa_causal {

// A block's threads, and whether the device has the shared memory for it.
struct Form {
  int threads = 0;
  int64_t shared_bytes = 0;
  bool vectors = false, fits = false;
};

template <class F>
void with_access(const TssaCall& c, bool vectors, F&& f) {
  vectors ? f(TssaFours(c.dtype)) : f(TssaScalars(c.dtype));
}

inline void cut(TssaCall& c, int chunk_size) {
  c.chunk_size = std::max(chunk_size, 1);
  c.nchunks = std::max(1, (c.seqlen + c.chunk_size - 1) / c.chunk_size);
}

// Cuts sequences in chunks; a sequence is one where it is short, or, forward, where there are enough to fill the
// device.
inline Form choose(TssaCall& c, const Tensor& w, const Tensor* dout, int32_t device) {
  Form form;
  if (c.width == 0) return form;
  form.vectors = tssa_vectors(w, TssaFours::kCount) && (dout == nullptr || tssa_vectors(*dout, TssaFours::kCount));
  const int count = form.vectors ? TssaFours::kCount : 1, limit = shared_limit(device);
  form.threads = std::clamp((c.width / count + 31) / 32 * 32, 64, dout == nullptr ? 512 : 256);
  if (dout == nullptr) {
    const bool many = int64_t{c.nsequences} * form.threads / 32 >= 16 * multiprocessors(device);
    cut(c, many ? c.seqlen : std::min(c.seqlen, 64));
    form.shared_bytes = TssaCausalShared(c, count).bytes;
  } else {
    // Short chunks have no running sums to keep: they serve tokens that are too wide for long ones.
    for (const int chunk : {32, kBackMark}) {
      cut(c, std::min(c.seqlen, chunk));
      form.shared_bytes = TssaCausalBackwardShared(c, count, true).bytes;
      if (form.shared_bytes <= limit) break;
    }
  }
  form.fits = form.shared_bytes <= limit;
  return form;
}

inline int64_t chunks(Tensor w, std::optional<Tensor> dout, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  TssaCall c = tssa_call(w, cu_seqlens, max_seqlen);
  return choose(c, w, dout.has_value() ? &*dout : nullptr, w.get_device_index()).fits ? c.nchunks : -1;
}

inline void check_fits(const Form& form, const TssaCall& c) {
  STD_TORCH_CHECK(form.fits, "nheads * head_dim = ", c.width, " needs ", form.shared_bytes,
                  " bytes of shared memory, more than this device has");
}

inline void forward(Tensor w, Tensor temp, std::optional<Tensor> denom_bias, std::optional<Tensor> key_padding_mask,
                    std::optional<Tensor> cu_seqlens, int64_t max_seqlen, std::optional<Tensor> seed, double dropout_p,
                    Tensor out, Tensor membership, std::optional<Tensor> sums_1, std::optional<Tensor> sums_2,
                    std::optional<Tensor> energy, std::optional<Tensor> weighted, std::optional<Tensor> mass,
                    std::optional<Tensor> lengths) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaCausal f = {};
  f.call = tssa_call(w, temp, key_padding_mask, cu_seqlens, max_seqlen, seed, dropout_p);
  const TssaCall& c = f.call;
  const Form form = choose(f.call, w, nullptr, device);
  check_fits(form, c);
  f.w = tssa_tokens(w, cu_seqlens.has_value());
  f.out = tssa_tokens(out, cu_seqlens.has_value());
  f.membership = tssa_floats(membership);
  f.bias = tssa_floats(denom_bias);
  f.bias_tokens = denom_bias.has_value() ? denom_bias->size(1) : 0;
  f.sums_1 = tssa_floats(sums_1);
  f.sums_2 = tssa_floats(sums_2);
  f.energy = tssa_floats(energy);
  f.weighted = tssa_floats(weighted);
  f.mass = tssa_floats(mass);
  if (lengths.has_value()) f.lengths = static_cast<int32_t*>(lengths->data_ptr());
  const Launch l = {int64_t{c.nsequences} * c.nchunks, form.threads, form.shared_bytes, 1, current_stream(device)};
  with_access(c, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if (c.nchunks == 1) return launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    const int64_t size = c.width + c.nheads;
    check_sums("sums_1", sums_1, c, size);
    check_sums("sums_2", sums_2, c, size);
    Launch by_thread = l;  // without shared memory
    by_thread.shared_bytes = 0;
    launch<tssa_causal_fwd_energy_kernel<Access>>(by_thread, f, access);
    scan_chunks(c, f.sums_1, size, TssaScan::before, l.stream, f.energy);
    launch<tssa_causal_fwd_members_kernel<Access>>(l, f, access);
    scan_chunks(c, f.sums_2, size, TssaScan::before, l.stream, f.weighted, f.mass);
    launch<tssa_causal_fwd_output_kernel<Access>>(by_thread, f, access);
  });
}

template <TssaCausalBackwardStep step, class Access>
void backward_step(const TssaCausalBackward& b, const Access& access, Launch l) {
  constexpr int count = Access::kCount;
  if (step == TssaCausalBackwardStep::totals) l.shared_bytes = 0;
  if (step == TssaCausalBackwardStep::dmoment) l.shared_bytes = b.call.width / count * sizeof(float);
  if (step == TssaCausalBackwardStep::dw) l.shared_bytes = TssaCausalBackwardShared(b.call, count, false).bytes;
  launch<tssa_causal_bwd_kernel<Access, step>>(l, b, access);
}

inline void backward(Tensor dout, std::optional<Tensor> dmembership, Tensor w, Tensor temp,
                     std::optional<Tensor> denom_bias, Tensor membership, std::optional<Tensor> key_padding_mask,
                     std::optional<Tensor> cu_seqlens, int64_t max_seqlen, std::optional<Tensor> seed, double dropout_p,
                     Tensor dw, Tensor dlogit, std::optional<Tensor> dtemp, std::optional<Tensor> ddenom_bias,
                     std::optional<Tensor> totals, std::optional<Tensor> dmoments, std::optional<Tensor> denergies) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaCausalBackward b = {};
  b.call = tssa_call(w, temp, key_padding_mask, cu_seqlens, max_seqlen, seed, dropout_p);
  const TssaCall& c = b.call;
  const Form form = choose(b.call, w, &dout, device);
  check_fits(form, c);
  b.w = tssa_tokens(w, cu_seqlens.has_value());
  b.dout = tssa_tokens(dout, cu_seqlens.has_value());
  b.dw = tssa_tokens(dw, cu_seqlens.has_value());
  b.membership = tssa_floats(membership);
  b.dmembership = tssa_floats(dmembership);
  b.bias = tssa_floats(denom_bias);
  b.bias_tokens = denom_bias.has_value() ? denom_bias->size(1) : 0;
  b.dlogit = tssa_floats(dlogit);
  b.dtemp = tssa_floats(dtemp);
  b.totals = tssa_floats(totals);
  b.dmoments = tssa_floats(dmoments);
  b.denergies = tssa_floats(denergies);
  const Launch l = {int64_t{c.nsequences} * c.nchunks, form.threads, form.shared_bytes, 1, current_stream(device)};
  with_access(c, form.vectors, [&](auto access) {
    const int64_t size = c.width + c.nheads;
    if (c.nchunks > 1) {
      check_sums("totals", totals, c, size + c.width);
      check_sums("dmoments", dmoments, c, size);
      check_sums("denergies", denergies, c, size);
      backward_step<TssaCausalBackwardStep::totals>(b, access, l);
      scan_chunks(c, b.totals, size + c.width, TssaScan::before, l.stream);
      backward_step<TssaCausalBackwardStep::dmoment>(b, access, l);
      scan_chunks(c, b.dmoments, size, TssaScan::behind, l.stream);
    } else {
      STD_TORCH_CHECK(dtemp.has_value() && !totals.has_value(), "dtemp must be given where a sequence is one chunk");
    }
    backward_step<TssaCausalBackwardStep::dlogit>(b, access, l);
    if (c.nchunks > 1) scan_chunks(c, b.denergies, size, TssaScan::behind, l.stream);
    backward_step<TssaCausalBackwardStep::dw>(b, access, l);
  });
  if (ddenom_bias.has_value()) {
    const int64_t places = c.nheads * b.bias_tokens;
    launch<tssa_causal_dbias_kernel<>>({(places + 255) / 256, 256, 0, 1, l.stream}, b, tssa_floats(ddenom_bias));
  }
}

}  // namespace tssa_causal
}  // namespace crate_kernels
