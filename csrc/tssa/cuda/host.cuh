// Turns PyTorch's tensors into a call of tssa's CUDA kernels, and says how to launch them.
#pragma once

#include <algorithm>
#include <optional>

#include "../../common/cuda/launch.cuh"
#include "../given.h"
#include "access.cuh"
#include "scan.cuh"

namespace crate_kernels {

inline float* tssa_floats(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<float*>(t->data_ptr()) : nullptr;
}

inline TssaTokens tssa_tokens(const Tensor& t, bool packed) {
  char* const data = static_cast<char*>(t.data_ptr());
  if (packed) return {data, 0, t.stride(1), t.stride(0), t.stride(2)};
  return {data, t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

inline TssaProblem tssa_problem(const Tensor& w, const TssaCall& call) {
  TssaProblem p = {};
  p.dtype = dtype_of(w);
  p.nsequences = static_cast<int>(call.nsequences(w));
  p.nheads = static_cast<int>(w.size(1));
  p.head_dim = static_cast<int>(w.size(w.dim() - 1));
  p.width = p.nheads * p.head_dim;
  p.seqlen = static_cast<int>(call.packed() ? call.max_seqlen : w.size(2));
  p.total = call.packed() ? w.size(0) : 0;
  p.rows_sequence = call.packed() ? 0 : int64_t{p.nheads} * p.seqlen;
  p.rows_head = call.packed() ? p.total : p.seqlen;
  if (call.packed()) p.cu_seqlens = static_cast<const int32_t*>(call.cu_seqlens->data_ptr());
  if (call.key_padding_mask.has_value()) {
    const Tensor& mask = *call.key_padding_mask;
    p.mask = {static_cast<const uint8_t*>(mask.data_ptr()), mask.stride(0), 0, mask.stride(1), 0};
  }
  if (call.seed.has_value()) {
    p.seed = static_cast<const int64_t*>(call.seed->data_ptr());
    p.keep_from = call.keep_from();
    p.keep_factor = call.keep_factor();
  }
  return p;
}

template <class Args>
TssaPass tssa_pass(const Args& t) {
  TssaPass pass = {};
  pass.problem = tssa_problem(t.w, t.call);
  pass.problem.temp = tssa_floats(t.temp);
  pass.w = tssa_tokens(t.w, t.call.packed());
  pass.membership = tssa_floats(t.membership);
  if (!t.causal) {
    pass.energy = tssa_floats(t.energy);
    pass.moment = tssa_floats(t.moment);
  }
  pass.bias = tssa_floats(t.denom_bias);
  pass.bias_tokens = t.denom_bias.has_value() ? t.denom_bias->size(1) : 0;
  pass.sums_1 = tssa_floats(t.sums_1);
  pass.sums_2 = tssa_floats(t.sums_2);
  return pass;
}

inline TssaForward tssa_forward(const TssaForwardArgs& t) {
  TssaForward f = {tssa_pass(t), tssa_tokens(t.out, t.call.packed()), nullptr, nullptr, nullptr, nullptr};
  if (!t.lengths.has_value()) return f;
  f.state_energy = static_cast<double*>(t.energy->data_ptr());
  f.state_moment = static_cast<double*>(t.moment->data_ptr());
  f.state_mass = static_cast<double*>(t.mass->data_ptr());
  f.lengths = static_cast<int32_t*>(t.lengths->data_ptr());
  return f;
}

inline TssaBackward tssa_backward(const TssaBackwardArgs& t) {
  const bool packed = t.call.packed();
  return {tssa_pass(t),         tssa_tokens(t.dout, packed), tssa_tokens(t.dw, packed), tssa_floats(t.dmembership),
          tssa_floats(t.dtemp), tssa_floats(t.dlogit),       tssa_floats(t.sums_3)};
}

// One way to launch a call. It `fits` if the device has the shared memory for it.
struct TssaForm {
  int cluster = 0;   // blocks that have a sequence on chip; 0: not on chip
  int64_t cuts = 0;  // chunks per sequence; 0: a sequence is not cut
  int threads = 0;
  int64_t shared_bytes = 0;
  bool vectors = false, fits = false;

  Launch launch(const TssaProblem& p, int32_t device) const {
    const int64_t blocks = cluster > 0 ? cluster : p.nchunks;
    return {p.nsequences * blocks, threads, shared_bytes, std::max(cluster, 1), current_stream(device)};
  }
};

// Says if `count` neighbouring channels of every token can be read and written at once.
inline bool tssa_vectors(const Tensor& t, int64_t count) {
  const int64_t last = t.dim() - 1;
  bool fits = t.stride(last) == 1 && t.size(last) % count == 0 &&
              reinterpret_cast<uintptr_t>(t.data_ptr()) % (count * itemsize(dtype_of(t))) == 0;
  for (int64_t i = 0; i < last; ++i) fits = fits && (t.size(i) == 1 || t.stride(i) % count == 0);
  return fits;
}

// The same for w and, in a backward, dout.
inline bool tssa_vectors(const Tensor& w, const Tensor* dout, int64_t count) {
  return tssa_vectors(w, count) && (dout == nullptr || tssa_vectors(*dout, count));
}

inline void cut_in_chunks(TssaProblem& p, int chunk_size) {
  p.chunk_size = std::max(chunk_size, 1);
  p.nchunks = std::max(1, (p.seqlen + p.chunk_size - 1) / p.chunk_size);
}

// Replaces the sums of every chunk in `sums`, `size` per chunk. `channels` and `by_head` are sums before the first, and
// become those behind the last.
inline void scan_chunks(const TssaProblem& p, float* sums, int64_t size, TssaScan scan, cudaStream_t stream,
                        double* channels = nullptr, double* by_head = nullptr) {
  const TssaSums a = {sums, p.nchunks, static_cast<int>(size), scan, channels, by_head, p.nheads};
  const int64_t blocks = (size + kScanColumns - 1) / kScanColumns;
  launch<tssa_scan_chunks_kernel<>>({p.nsequences * blocks, kScanColumns * kScanParts,
                                     static_cast<int64_t>(kScanColumns * kScanParts * sizeof(double)), 1, stream},
                                    a);
}

inline void check_sums(const char* name, const std::optional<Tensor>& sums, const Tensor& w, const TssaProblem& p,
                       int64_t size) {
  const Given given("tssa", device_type(), "w", w);
  given.present(name, sums);
  given.numbers(name, sums, {p.nsequences, p.nchunks + 1, size});
}

}  // namespace crate_kernels
