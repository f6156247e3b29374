// Chooses between chip and chunks for the full form, and launches it.
#pragma once

#include "full_backward.cuh"
#include "host.cuh"

namespace crate_kernels {
namespace tssa_full {

constexpr int kChunkThreads = 256;

// One way to run a call: on chip with `cluster` blocks per sequence, in chunks (cluster 0), or not at all.
struct Form {
  int cluster = 0, threads = kChunkThreads;
  int64_t shared_bytes = 0;
  bool vectors = false, fits = false;
};

template <class F>
void with_access(const TssaProblem& p, bool vectors, F&& f) {
  if (!vectors) return f(TssaScalars(p.dtype));
  if (p.dtype == Dtype::f32) return f(TssaFloats(p.dtype));
  f(TssaHalves(p.dtype));
}

// One thread per eight accesses to a block's tokens, from 64 to 512.
inline int resident_threads(const TssaProblem& p, int64_t rows) {
  const int64_t wanted = rows * p.width * p.itemsize() / 16 / 8;
  return wanted >= 512 ? 512 : wanted >= 256 ? 256 : wanted >= 128 ? 128 : 64;
}

template <class Access>
int clusters_at_once(const Launch& l, bool backward, int32_t device) {
  return backward ? active_clusters<tssa_full_bwd_resident_kernel<Access>>(l, device)
                  : active_clusters<tssa_full_fwd_resident_kernel<Access>>(l, device);
}

// Sets the form's size for tokens on chip. Starts from the smallest cluster that holds them. Doubles it while a block
// takes more than half of a multiprocessor's shared memory (so that one block can load while another computes), or
// while multiprocessors are idle.
inline void put_on_chip(const TssaProblem& p, bool backward, int32_t device, Form& form) {
  const int64_t limit = shared_limit(device), sms = multiprocessors(device);
  const int largest = compute_capability(device) >= 90 ? 8 : 1;
  for (int cluster = 1; cluster <= largest; cluster *= 2) {
    const int64_t rows = (p.seqlen + cluster - 1) / cluster;
    if (rows > limit) continue;  // a token takes more than one byte
    const int threads = resident_threads(p, rows);
    const TssaResident layout(p, static_cast<int>(rows), threads, backward);
    if (layout.bytes > limit) continue;
    form.cluster = cluster;
    form.threads = threads;
    form.shared_bytes = layout.bytes;
    const bool spread = 2 * layout.bytes > limit || 2 * p.nsequences * int64_t{cluster} <= sms;
    if (!spread || rows < 32) break;
  }
}

// Cuts the tokens into chunks of 32 to 256, so that every multiprocessor gets four blocks, and of at most 48 kB. Some
// steps read a chunk twice, and the chunks of a few hundred blocks should then still be in the caches.
inline void cut_in_chunks(TssaProblem& p, bool backward, int32_t device, Form& form) {
  form.cluster = 0;
  form.threads = kChunkThreads;
  const int64_t share = int64_t{p.nsequences} * p.seqlen / (4 * multiprocessors(device));
  const int64_t cached = 48 * 1024 / (p.width * p.itemsize() * (backward ? 2 : 1)) / 16 * 16;
  p.chunk_size =
      static_cast<int>(std::min(std::clamp<int64_t>((share + 15) / 16 * 16, 32, 256), std::max<int64_t>(cached, 16)));
  p.nchunks = std::max(1, (p.seqlen + p.chunk_size - 1) / p.chunk_size);
  form.shared_bytes = tssa_scratch(p, kChunkThreads) + (int64_t{p.width} + p.nheads) * sizeof(float);
  form.fits = form.shared_bytes <= shared_limit(device);
}

// The form of a call, a pure function of its sizes, strides and device. Tokens are on chip if they fit, and if either
// this ends before further launches would have begun (256 kB) or at most half of the multiprocessors are idle.
inline Form choose(TssaProblem& p, const Tensor& w, const Tensor* dout, int32_t device) {
  Form form;
  if (p.width == 0) return form;
  const int count = static_cast<int>(16 / p.itemsize());
  form.vectors = tssa_vectors(w, count) && (dout == nullptr || tssa_vectors(*dout, count));
  set_lanes(p, form.vectors ? count : 1);
  if (form.vectors) put_on_chip(p, dout != nullptr, device, form);
  if (form.cluster > 1) {
    const Launch l = {form.cluster, form.threads, form.shared_bytes, form.cluster, current_stream(device)};
    with_access(p, true, [&](auto access) {
      using Access = decltype(access);
      if constexpr (Access::kCount > 1) {
        if (clusters_at_once<Access>(l, dout != nullptr, device) == 0) form.cluster = 0;
      }
    });
  }
  const int64_t bytes = int64_t{p.seqlen} * p.width * p.itemsize(), busy = int64_t{p.nsequences} * form.cluster;
  form.fits = form.cluster > 0 && (bytes <= 256 * 1024 || 2 * busy >= multiprocessors(device));
  if (!form.fits) cut_in_chunks(p, dout != nullptr, device, form);
  return form;
}

inline int64_t chunks(Tensor w, std::optional<Tensor> dout, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaProblem p = tssa_problem(w, {std::nullopt, cu_seqlens, max_seqlen});
  const Form form = choose(p, w, dout.has_value() ? &*dout : nullptr, device);
  return form.cluster > 0 ? 0 : form.fits ? p.nchunks : -1;
}

inline void check_fits(const Form& form, const TssaProblem& p) {
  STD_TORCH_CHECK(form.fits, "nheads * head_dim = ", p.width, " needs ", form.shared_bytes,
                  " bytes of shared memory, more than this device has");
}

template <class Access>
void forward_in_chunks(const TssaForward& f, const Access& access, const Launch& l) {
  const int64_t size = f.problem.width + f.problem.nheads;
  launch<tssa_full_fwd_chunk_kernel<Access, TssaStep::energy>>(l, f, access);
  scan_chunks(f.problem, f.sums_1, size, TssaScan::total, l.stream);
  launch<tssa_full_fwd_chunk_kernel<Access, TssaStep::members>>(l, f, access);
  scan_chunks(f.problem, f.sums_2, size, TssaScan::total, l.stream);
  launch<tssa_full_fwd_chunk_kernel<Access, TssaStep::output>>(l, f, access);
}

inline void forward(Tensor w, Tensor temp, TssaCall call, Tensor out, Tensor membership, Tensor energy, Tensor moment,
                    std::optional<Tensor> sums_1, std::optional<Tensor> sums_2) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaForward f = {};
  f.problem = tssa_problem(w, call);
  f.problem.temp = tssa_floats(temp);
  const Form form = choose(f.problem, w, nullptr, device);
  check_fits(form, f.problem);
  f.w = tssa_tokens(w, call.packed());
  f.out = tssa_tokens(out, call.packed());
  f.membership = tssa_floats(membership);
  f.energy = tssa_floats(energy);
  f.moment = tssa_floats(moment);
  f.sums_1 = tssa_floats(sums_1);
  f.sums_2 = tssa_floats(sums_2);
  Launch l = {int64_t{f.problem.nsequences} * form.cluster, form.threads, form.shared_bytes, std::max(form.cluster, 1),
              current_stream(device)};
  with_access(f.problem, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if constexpr (Access::kCount > 1) {
      if (form.cluster > 0) return launch<tssa_full_fwd_resident_kernel<Access>>(l, f, access);
    }
    check_sums("sums_1", sums_1, f.problem, f.problem.width + f.problem.nheads);
    check_sums("sums_2", sums_2, f.problem, f.problem.width + f.problem.nheads);
    l.grid = int64_t{f.problem.nsequences} * f.problem.nchunks;
    forward_in_chunks(f, access, l);
  });
}

template <class Access>
void backward_in_chunks(const TssaBackward& b, const Access& access, const Launch& l) {
  const int64_t size = b.problem.width + b.problem.nheads;
  launch<tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dgate>>(l, b, access);
  scan_chunks(b.problem, b.sums_1, size, TssaScan::total, l.stream);
  launch<tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dlogit>>(l, b, access);
  scan_chunks(b.problem, b.sums_2, size, TssaScan::total, l.stream);
  launch<tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dw>>(l, b, access);
}

inline void backward(Tensor dout, std::optional<Tensor> dmembership, Tensor w, Tensor temp, Tensor membership,
                     Tensor energy, Tensor moment, TssaCall call, Tensor dw, Tensor dtemp, std::optional<Tensor> dlogit,
                     std::optional<Tensor> sums_1, std::optional<Tensor> sums_2) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  TssaBackward b = {};
  b.problem = tssa_problem(w, call);
  b.problem.temp = tssa_floats(temp);
  const Form form = choose(b.problem, w, &dout, device);
  check_fits(form, b.problem);
  b.w = tssa_tokens(w, call.packed());
  b.dout = tssa_tokens(dout, call.packed());
  b.dw = tssa_tokens(dw, call.packed());
  b.membership = tssa_floats(membership);
  b.dmembership = tssa_floats(dmembership);
  b.energy = tssa_floats(energy);
  b.moment = tssa_floats(moment);
  b.dtemp = tssa_floats(dtemp);
  b.dlogit = tssa_floats(dlogit);
  b.sums_1 = tssa_floats(sums_1);
  b.sums_2 = tssa_floats(sums_2);
  Launch l = {int64_t{b.problem.nsequences} * form.cluster, form.threads, form.shared_bytes, std::max(form.cluster, 1),
              current_stream(device)};
  with_access(b.problem, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if constexpr (Access::kCount > 1) {
      if (form.cluster > 0) return launch<tssa_full_bwd_resident_kernel<Access>>(l, b, access);
    }
    check_sums("sums_1", sums_1, b.problem, b.problem.width + b.problem.nheads);
    check_sums("sums_2", sums_2, b.problem, b.problem.width + b.problem.nheads);
    STD_TORCH_CHECK(dlogit.has_value(), "dlogit must be given where a sequence is cut in chunks");
    l.grid = int64_t{b.problem.nsequences} * b.problem.nchunks;
    backward_in_chunks(b, access, l);
  });
}

}  // namespace tssa_full
}  // namespace crate_kernels
