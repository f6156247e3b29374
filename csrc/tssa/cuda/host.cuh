// Turns PyTorch's tensors into a call of tssa's CUDA kernels.
#pragma once

#include <algorithm>
#include <optional>

#include "../../common/cuda/launch.cuh"
#include "../call.h"
#include "access.cuh"
#include "scan.cuh"

namespace crate_kernels {

inline float* tssa_floats(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<float*>(t->data_ptr()) : nullptr;
}

inline float* tssa_floats(const Tensor& t) {
  return static_cast<float*>(t.data_ptr());
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
    p.mask = {static_cast<const bool*>(mask.data_ptr()), mask.stride(0), 0, mask.stride(1), 0};
  }
  if (call.seed.has_value()) {
    p.seed = static_cast<const int64_t*>(call.seed->data_ptr());
    p.keep_from = call.keep_from();
    p.keep_factor = call.keep_factor();
  }
  return p;
}

// Says if `count` neighbouring channels of every token can be read and written at once.
inline bool tssa_vectors(const Tensor& t, int64_t count) {
  const int64_t last = t.dim() - 1;
  bool fits = t.stride(last) == 1 && t.size(last) % count == 0 &&
              reinterpret_cast<uintptr_t>(t.data_ptr()) % (count * itemsize(dtype_of(t))) == 0;
  for (int64_t i = 0; i < last; ++i) fits = fits && (t.size(i) == 1 || t.stride(i) % count == 0);
  return fits;
}

// Sets the lanes of a warp that share a head's channels, `count` of them per lane at a time.
inline void set_lanes(TssaProblem& p, int count) {
  for (p.lanes = 1; p.lanes < 32 && p.lanes * count < p.head_dim;) p.lanes *= 2;
}

inline void scan_chunks(const TssaProblem& p, float* sums, int64_t size, TssaScan scan, cudaStream_t stream,
                        const float* channels = nullptr, const float* by_head = nullptr) {
  const TssaSums a = {sums, p.nchunks, static_cast<int>(size), scan, channels, by_head, p.nheads};
  const int64_t blocks = (size + kScanColumns - 1) / kScanColumns;
  launch<tssa_scan_chunks_kernel<>>({p.nsequences * blocks, kScanColumns * kScanParts,
                                     static_cast<int64_t>(kScanColumns * kScanParts * sizeof(float)), 1, stream},
                                    a);
}

inline void check_sums(const char* name, const std::optional<Tensor>& sums, const TssaProblem& p, int64_t size) {
  STD_TORCH_CHECK(
      sums.has_value() && sums->size(0) == p.nsequences && sums->size(1) == p.nchunks + 1 && sums->size(2) == size,
      name, " must be (", p.nsequences, ", ", p.nchunks + 1, ", ", size, ")");
}

}  // namespace crate_kernels
