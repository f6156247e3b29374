// The launches of decoding: append new tokens to a cache and attend over it, without waiting for the device.
#include "decode_combine.cuh"
#include "host.cuh"

namespace crate_kernels::decoding {
namespace {

// Tokens per block, if a block has several: _GROUP of native.py.
constexpr int kGroup = 4;

Step step_of(const Tensor& w, const mssa::Cache& cache, const MssaDecodeCall& call) {
  Step c = {};
  c.w = rows_of(w, false);
  c.cache = rows_of(cache.data, false);
  c.keep = pointer<const bool>(call.key_padding_mask);
  c.lengths = static_cast<int32_t*>(cache.lengths.data_ptr());
  c.dtype = dtype_of(w);
  c.nheads = static_cast<int>(w.size(1));
  c.count = static_cast<int>(w.size(2));
  c.capacity = static_cast<int>(cache.data.size(2));
  c.head_dim = head_dim_of(w);
  c.scale = static_cast<float>(call.scale);
  return c;
}

template <class T, int VECTORS>
void launch_decode(Step c, int64_t heads, cudaStream_t stream) {
  const int tokens = c.count == 1 ? 1 : kGroup;
  c.groups = (c.count + tokens - 1) / tokens;
  const Launch l = {heads * c.groups * c.splits, kThreads, decode_shared(tokens, c.head_dim), 1, stream};
  if (tokens == 1) {
    launch<mssa_decode_kernel<T, 1, VECTORS>>(l, c);
  } else {
    launch<mssa_decode_kernel<T, kGroup, VECTORS>>(l, c);
  }
}

}  // namespace

void step(const Tensor& w, const mssa::Cache& cache, const MssaDecodeCall& call, const Tensor& out, const Tensor& lse,
          const Tensor& part, const Tensor& statistics) {
  Step c = step_of(w, cache, call);
  STD_TORCH_CHECK(c.w.wide && c.cache.wide, "tokens must be rows of whole 16 bytes, got head_dim ", c.head_dim);
  c.out = rows_of(out, false);
  c.lse = lse.numel() > 0 ? static_cast<float*>(lse.data_ptr()) : nullptr;
  c.part = static_cast<float*>(part.data_ptr());
  c.statistics = static_cast<float*>(statistics.data_ptr());
  c.splits = static_cast<int>(part.size(1));
  const int64_t heads = w.size(0) * c.nheads;
  const cudaStream_t stream = current_stream(w.get_device_index());
  with_dtype(c.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int packs = (c.head_dim + Pack<T>::kCount - 1) / Pack<T>::kCount;
    c.lanes = 1;
    while (c.lanes < packs && c.lanes < static_cast<int>(kWarp)) c.lanes *= 2;
    if constexpr (sizeof(T) == 4) {  // 256 halves are one pack per lane
      if (packs > c.lanes) {
        launch_decode<T, 2>(c, heads, stream);
      } else {
        launch_decode<T, 1>(c, heads, stream);
      }
    } else {
      launch_decode<T, 1>(c, heads, stream);
    }
    const int threads = (c.head_dim + static_cast<int>(kWarp) - 1) / static_cast<int>(kWarp) * static_cast<int>(kWarp);
    launch<mssa_decode_combine_kernel<T>>({heads * c.count, threads, 0, 1, stream}, c);
  });
}

void append(const Tensor& w, const mssa::Cache& cache, const MssaDecodeCall& call) {
  Step c = step_of(w, cache, call);
  c.groups = (c.count + kThreads - 1) / kThreads;
  const Launch l = {w.size(0) * c.nheads * c.groups, kThreads, 0, 1, current_stream(w.get_device_index())};
  with_dtype(c.dtype, [&](auto zero) { launch<mssa_append_kernel<decltype(zero)>>(l, c); });
}

void advance(const Tensor& w, const mssa::Cache& cache, const MssaDecodeCall& call) {
  const Launch l = {w.size(0), static_cast<int>(kWarp), 0, 1, current_stream(w.get_device_index())};
  launch<mssa_advance_kernel>(l, step_of(w, cache, call));
}

}  // namespace crate_kernels::decoding
