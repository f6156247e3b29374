// From PyTorch's tensors to a call of tssa's CUDA kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "../../common/cuda/launch.cuh"
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
  if (packed) return {t.data_ptr(), 0, t.stride(1), t.stride(0), t.stride(2)};
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The sizes of a call; the rest is null.
inline TssaCall tssa_call(const Tensor& w, const std::optional<Tensor>& cu_seqlens, int64_t max_seqlen) {
  const bool packed = cu_seqlens.has_value();
  TssaCall c = {};
  c.dtype = dtype_of(w);
  c.nsequences = static_cast<int>(packed ? cu_seqlens->size(0) - 1 : w.size(0));
  c.nheads = static_cast<int>(w.size(1));
  c.head_dim = static_cast<int>(w.size(w.dim() - 1));
  c.width = c.nheads * c.head_dim;
  c.seqlen = static_cast<int>(packed ? max_seqlen : w.size(2));
  c.total = packed ? w.size(0) : 0;
  if (packed) c.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->data_ptr());
  c.rows_batch = packed ? 0 : int64_t{c.nheads} * c.seqlen;
  c.rows_head = packed ? c.total : c.seqlen;
  return c;
}

inline TssaCall tssa_call(const Tensor& w, const Tensor& temp, const std::optional<Tensor>& key_padding_mask,
                          const std::optional<Tensor>& cu_seqlens, int64_t max_seqlen,
                          const std::optional<Tensor>& seed, double dropout_p) {
  TssaCall c = tssa_call(w, cu_seqlens, max_seqlen);
  c.temp = tssa_floats(temp);
  if (key_padding_mask.has_value()) {
    c.mask = static_cast<const bool*>(key_padding_mask->data_ptr());
    c.mask_batch = key_padding_mask->stride(0);
    c.mask_row = key_padding_mask->stride(1);
  }
  if (seed.has_value()) {
    c.seed = static_cast<const int64_t*>(seed->data_ptr());
    c.keep_from = static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0));
    c.keep_factor = static_cast<float>(1.0 / (1.0 - dropout_p));
  }
  return c;
}

// Whether `count` neighbouring channels of every token can be read and written at once.
inline bool tssa_vectors(const Tensor& t, int64_t count) {
  const int64_t last = t.dim() - 1;
  bool fits = t.stride(last) == 1 && t.size(last) % count == 0 &&
              reinterpret_cast<uintptr_t>(t.data_ptr()) % (count * itemsize(dtype_of(t))) == 0;
  for (int64_t i = 0; i < last; ++i) fits = fits && (t.size(i) == 1 || t.stride(i) % count == 0);
  return fits;
}

// Lanes of a warp that share a head's channels, `count` of them a lane at a time.
inline void set_lanes(TssaCall& c, int count) {
  for (c.lanes = 1; c.lanes < 32 && c.lanes * count < c.head_dim;) c.lanes *= 2;
}

inline void scan_chunks(const TssaCall& c, float* sums, int64_t size, TssaScan scan, cudaStream_t stream,
                        const float* channels = nullptr, const float* by_head = nullptr) {
  const TssaSums a = {sums, c.nchunks, static_cast<int>(size), scan, channels, by_head, c.nheads};
  const int64_t blocks = (size + kScanColumns - 1) / kScanColumns;
  launch<tssa_scan_chunks_kernel<>>({c.nsequences * blocks, kScanColumns * kScanParts,
                                     static_cast<int64_t>(kScanColumns * kScanParts * sizeof(float)), 1, stream},
                                    a);
}

inline void check_sums(const char* name, const std::optional<Tensor>& sums, const TssaCall& c, int64_t size) {
  STD_TORCH_CHECK(
      sums.has_value() && sums->size(0) == c.nsequences && sums->size(1) == c.nchunks + 1 && sums->size(2) == size,
      name, " must be (", c.nsequences, ", ", c.nchunks + 1, ", ", size, ")");
}

}  // namespace crate_kernels
