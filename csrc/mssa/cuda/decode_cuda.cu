// The CUDA ops of decoding: append new tokens to a cache and attend over it, without waiting for the device.
#include "decode_combine.cuh"

namespace crate_kernels {
namespace {

using decoding::Call;

// Tokens of a block, where they are several.
constexpr int kGroup = 4;

Call call_of(const Tensor& w, const Tensor& data, const Tensor& lengths,
             const std::optional<Tensor>& key_padding_mask) {
  Call c = {};
  c.w = rows_of(w, false);
  c.cache = rows_of(data, false);
  c.keep = pointer<const bool>(key_padding_mask);
  c.lengths = static_cast<int32_t*>(lengths.data_ptr());
  c.dtype = dtype_of(w);
  c.nheads = static_cast<int>(w.size(1));
  c.count = static_cast<int>(w.size(2));
  c.capacity = static_cast<int>(data.size(2));
  c.head_dim = head_dim_of(w);
  return c;
}

template <class T, int VECTORS>
void launch_decode(Call c, int64_t heads, cudaStream_t stream) {
  const int tokens = c.count == 1 ? 1 : kGroup;
  c.groups = (c.count + tokens - 1) / tokens;
  const Launch l = {heads * c.groups * c.splits, decoding::kThreads, decoding::decode_shared(tokens, c.head_dim), 1,
                    stream};
  if (tokens == 1) {
    launch<decoding::mssa_decode_kernel<T, 1, VECTORS>>(l, c);
  } else {
    launch<decoding::mssa_decode_kernel<T, kGroup, VECTORS>>(l, c);
  }
}

// Rows of tokens must be whole packs of 16 bytes. `part` (heads, splits, new, head_dim) and `statistics` (heads,
// splits, new, 2) are scratch; lse may be empty.
void decode(Tensor w, Tensor data, Tensor lengths, std::optional<Tensor> key_padding_mask, double scale, Tensor part,
            Tensor statistics, Tensor out, Tensor lse) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  Call c = call_of(w, data, lengths, key_padding_mask);
  STD_TORCH_CHECK(c.w.wide && c.cache.wide, "tokens must be rows of whole 16 bytes, got head_dim ", c.head_dim);
  c.out = rows_of(out, false);
  c.lse = lse.numel() > 0 ? static_cast<float*>(lse.data_ptr()) : nullptr;
  c.part = static_cast<float*>(part.data_ptr());
  c.statistics = static_cast<float*>(statistics.data_ptr());
  c.splits = static_cast<int>(part.size(1));
  c.scale = static_cast<float>(scale);
  const int64_t heads = w.size(0) * c.nheads;
  const cudaStream_t stream = current_stream(device);
  with_dtype(c.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int packs = (c.head_dim + Pack<T>::kCount - 1) / Pack<T>::kCount;
    c.lanes = 1;
    while (c.lanes < packs && c.lanes < static_cast<int>(kWarp)) c.lanes *= 2;
    if constexpr (sizeof(T) == 4) {  // 256 halves are a pack a lane
      if (packs > c.lanes) {
        launch_decode<T, 2>(c, heads, stream);
      } else {
        launch_decode<T, 1>(c, heads, stream);
      }
    } else {
      launch_decode<T, 1>(c, heads, stream);
    }
    const int threads = (c.head_dim + static_cast<int>(kWarp) - 1) / static_cast<int>(kWarp) * static_cast<int>(kWarp);
    launch<decoding::mssa_decode_combine_kernel<T>>({heads * c.count, threads, 0, 1, stream}, c);
  });
}

void append(Tensor w, Tensor data, Tensor lengths, std::optional<Tensor> key_padding_mask) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  Call c = call_of(w, data, lengths, key_padding_mask);
  c.groups = (c.count + decoding::kThreads - 1) / decoding::kThreads;
  const Launch l = {w.size(0) * c.nheads * c.groups, decoding::kThreads, 0, 1, current_stream(device)};
  with_dtype(c.dtype, [&](auto zero) { launch<decoding::mssa_append_kernel<decltype(zero)>>(l, c); });
}

void advance(Tensor w, Tensor data, Tensor lengths, std::optional<Tensor> key_padding_mask) {
  const int32_t device = w.get_device_index();
  const OnDevice on(device);
  const Launch l = {w.size(0), static_cast<int>(kWarp), 0, 1, current_stream(device)};
  launch<decoding::mssa_advance_kernel>(l, call_of(w, data, lengths, key_padding_mask));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "cuda_mssa_decode(Tensor w, Tensor(a!) data, Tensor(b!) lengths, Tensor? key_padding_mask, float scale, "
      "Tensor(c!) part, Tensor(d!) statistics, Tensor(e!) out, Tensor(f!) lse) -> ()");
  m.def("cuda_mssa_append(Tensor w, Tensor(a!) data, Tensor lengths, Tensor? key_padding_mask) -> ()");
  m.def("cuda_mssa_advance(Tensor w, Tensor data, Tensor(a!) lengths, Tensor? key_padding_mask) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CRATE_DEVICE_KEY, m) {
  m.impl("cuda_mssa_decode", TORCH_BOX(&decode));
  m.impl("cuda_mssa_append", TORCH_BOX(&append));
  m.impl("cuda_mssa_advance", TORCH_BOX(&advance));
}

}  // namespace crate_kernels
