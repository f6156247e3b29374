// Chooses between chip and chunks for the full form, and launches it.
#pragma once

#include "full_backward.cuh"
#include "host.cuh"

namespace crate_kernels {
namespace tssa_full {

constexpr int kChunkThreads = 256;

template <class F>
void with_access(const TssaProblem& p, bool vectors, F&& f) {
  if (!vectors) return f(TssaScalars{p.dtype});
  if (p.dtype == Dtype::f32) return f(TssaFloats{{p.dtype}});
  f(TssaHalves{{p.dtype}});
}

// One thread per eight accesses to a block's tokens, from 64 to 512.
inline int resident_threads(const TssaProblem& p, int64_t rows) {
  const int64_t wanted = rows * p.width * p.itemsize() / 16 / 8;
  return wanted >= 512 ? 512 : wanted >= 256 ? 256 : wanted >= 128 ? 128 : 64;
}

// Sets the form's size for tokens on chip. Starts from the smallest cluster that holds them. Doubles it while a block
// takes more than half of a multiprocessor's shared memory (so that one block can load while another computes), or
// while multiprocessors are idle.
inline void put_on_chip(const TssaProblem& p, bool backward, int32_t device, TssaForm& form) {
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
inline void put_in_chunks(TssaProblem& p, bool backward, int32_t device, TssaForm& form) {
  const int64_t share = int64_t{p.nsequences} * p.seqlen / (4 * multiprocessors(device));
  const int64_t cached = 48 * 1024 / (p.width * p.itemsize() * (backward ? 2 : 1)) / 16 * 16;
  cut_in_chunks(p, static_cast<int>(
                       std::min(std::clamp<int64_t>((share + 15) / 16 * 16, 32, 256), std::max<int64_t>(cached, 16))));
  form.cluster = 0;
  form.cuts = p.nchunks;
  form.threads = kChunkThreads;
  const int64_t channels = (backward ? 1 : tssa_reciprocals(p)) * p.width;
  form.shared_bytes = tssa_scratch(p, kChunkThreads) + (channels + p.nheads) * sizeof(float);
  form.fits = form.shared_bytes <= shared_limit(device);
}

// The form of a call, a pure function of its sizes, strides and device. Tokens are on chip if they fit, and if either
// this ends before further launches would have begun (256 kB) or at most half of the multiprocessors are idle.
inline TssaForm choose(TssaProblem& p, const Tensor& w, const Tensor* dout, int32_t device) {
  TssaForm form;
  if (p.width == 0) return form;
  const int count = static_cast<int>(16 / p.itemsize());
  form.vectors = tssa_vectors(w, dout, count);
  // The lanes of a warp that share a head's channels.
  for (p.lanes = 1; p.lanes < 32 && p.lanes * (form.vectors ? count : 1) < p.head_dim;) p.lanes *= 2;
  if (form.vectors) put_on_chip(p, dout != nullptr, device, form);
  if (form.cluster > 1) {
    const Launch l = form.launch(p, device);
    with_access(p, true, [&](auto access) {
      using Access = decltype(access);
      if constexpr (Access::kCount > 1) {
        const int clusters = dout != nullptr ? active_clusters<tssa_full_bwd_resident_kernel<Access>>(l, device)
                                             : active_clusters<tssa_full_fwd_resident_kernel<Access>>(l, device);
        if (clusters == 0) form.cluster = 0;
      }
    });
  }
  const int64_t bytes = int64_t{p.seqlen} * p.width * p.itemsize(), busy = int64_t{p.nsequences} * form.cluster;
  form.fits = form.cluster > 0 && (bytes <= 256 * 1024 || 2 * busy >= multiprocessors(device));
  if (!form.fits) put_in_chunks(p, dout != nullptr, device, form);
  return form;
}

// A step reads the totals of the step before it.
template <auto first, auto second, auto third, class Pass, class Access>
void launch_steps(const Pass& pass, const Access& access, const Launch& l) {
  const TssaProblem& p = pass.problem;
  launch<first>(l, pass, access);
  scan_chunks(p, pass.sums_1, p.width + p.nheads, TssaScan::total, l.stream);
  launch<second>(l, pass, access);
  scan_chunks(p, pass.sums_2, p.width + p.nheads, TssaScan::total, l.stream);
  launch<third>(l, pass, access);
}

inline void forward(const TssaForward& f, const TssaForm& form, const Launch& l) {
  with_access(f.problem, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if constexpr (Access::kCount > 1) {
      if (form.cluster > 0) return launch<tssa_full_fwd_resident_kernel<Access>>(l, f, access);
    }
    launch_steps<tssa_full_fwd_chunk_kernel<Access, TssaStep::energy>,
                 tssa_full_fwd_chunk_kernel<Access, TssaStep::members>,
                 tssa_full_fwd_chunk_kernel<Access, TssaStep::output>>(f, access, l);
  });
}

inline void backward(const TssaBackward& b, const TssaForm& form, const Launch& l) {
  with_access(b.problem, form.vectors, [&](auto access) {
    using Access = decltype(access);
    if constexpr (Access::kCount > 1) {
      if (form.cluster > 0) return launch<tssa_full_bwd_resident_kernel<Access>>(l, b, access);
    }
    launch_steps<tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dgate>,
                 tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dlogit>,
                 tssa_full_bwd_chunk_kernel<Access, TssaBackwardStep::dw>>(b, access, l);
  });
}

}  // namespace tssa_full
}  // namespace crate_kernels
