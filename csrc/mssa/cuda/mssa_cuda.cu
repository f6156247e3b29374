// Subspace attention of bf16 and fp16 on tensor cores: which kernel a call takes. One file, as PyTorch's headers are
// what half of its compilation goes to.
#include "mma_backward_kernel.cuh"
#include "mma_forward.cuh"
#include "mma_host.cuh"
#include "mma_pairs.cuh"
#include "mma_shift.cuh"

namespace crate_kernels {
namespace {

using namespace mssa;

constexpr int kPairsDim = 64;

// A block of the pair form has a head to itself: there are to be enough of them for every multiprocessor.
bool takes_pairs(const Call& call, int32_t device) {
  const bool plain = call.scale > 0.0f && !call.select && !call.causal && call.keep == nullptr &&
                     call.cu_seqlens == nullptr && call.seed == nullptr;
  const int64_t heads = static_cast<int64_t>(call.sequences) * call.nheads;
  return plain && call.seqlen <= 16 * kMostTiles && call.access.head_dim <= kPairsDim &&
         heads >= multiprocessors(device);
}

template <class T>
void launch_pairs(Call& call, int32_t device) {
  const int tiles = (call.seqlen + 15) / 16;
  call.blocks = 1;
  Launch l = {};
  l.grid = static_cast<int64_t>(call.sequences) * call.nheads;
  l.threads = tiles * 32;
  l.shared_bytes = pairs_shared_bytes<T, kPairsDim>(tiles);
  l.stream = current_stream(device);
  launch<mma_pairs_kernel<T, kPairsDim>>(l, call);
}

void launch_forward(Call& call, Dtype dtype, int32_t device) {
  const OnDevice guard(device);
  with_class(dtype, call.access.head_dim, [&](auto dim, auto zero) {
    using T = decltype(zero);
    constexpr int kDim = dim;
    if constexpr (kDim <= kPairsDim) {
      if (takes_pairs(call, device)) return launch_pairs<T>(call, device);
    }
    constexpr Tiles t = kForward<kDim>;
    const Launch l = launch_of(call, device, 16 * t.rows, kDim * sizeof(T), 2 * t.columns * kDim * sizeof(T));
    launch<mma_forward_kernel<T, kDim, t.rows, t.columns, t.held>>(l, call);
  });
}

void forward(Tensor w, std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens,
             std::optional<Tensor> seed, int64_t max_seqlen, bool causal, double scale, double dropout_p,
             double threshold, Tensor out, Tensor lse) {
  Call call = call_of(w, key_padding_mask, cu_seqlens, seed, max_seqlen, causal, scale, dropout_p, threshold, lse, out);
  launch_forward(call, dtype_of(w), w.get_device_index());
}

// Attend over a cache to which `w` was appended, but whose lengths are still those of before; lse may be empty.
void prefill(Tensor w, Tensor data, Tensor lengths, std::optional<Tensor> key_padding_mask, double scale, Tensor out,
             Tensor lse) {
  Call call = call_of(w, key_padding_mask, std::nullopt, std::nullopt, 0, true, scale, 0.0, -1.0, lse, out);
  call.keys = data.data_ptr();
  call.key_strides = strides_of(data, false);
  call.held = static_cast<const int32_t*>(lengths.data_ptr());
  call.capacity = static_cast<int>(data.size(2));
  call.access.wide = call.access.wide && is_wide(data);
  launch_forward(call, dtype_of(w), w.get_device_index());
}

template <class T, int DIM>
void launch_shift(Call call, const Launch& like) {
  Launch l = like;
  constexpr int kRows = kShiftWarps * 16;
  call.blocks = std::max((call.seqlen + kRows - 1) / kRows, 1);
  l.grid = static_cast<int64_t>(call.sequences) * call.nheads * call.blocks;
  l.threads = kShiftWarps * 32;
  if (call.seed != nullptr && call.g != nullptr && !call.select) {
    l.shared_bytes = dropout_shift_bytes<DIM>();
    launch<mma_dropout_shift_kernel<T, DIM>>(l, call);
  } else {
    l.shared_bytes = 0;
    launch<mma_shift_kernel<T>>(l, call);
  }
}

void backward(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor w, Tensor out, Tensor lse,
              std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens, std::optional<Tensor> seed,
              int64_t max_seqlen, bool causal, double scale, double dropout_p, double threshold, Tensor shift,
              Tensor dw) {
  Call call = call_of(w, key_padding_mask, cu_seqlens, seed, max_seqlen, causal, scale, dropout_p, threshold, lse, dw);
  call.out = out.data_ptr();
  call.out_strides = strides_of(out, cu_seqlens.has_value());
  call.shift = static_cast<float*>(shift.data_ptr());
  if (dlse) call.dlse = static_cast<const float*>(dlse->data_ptr());
  call.access.wide = call.access.wide && is_wide(out);
  if (dout) {
    call.g = dout->data_ptr();
    call.g_strides = strides_of(*dout, cu_seqlens.has_value());
    call.access.wide = call.access.wide && is_wide(*dout);
  }
  const int32_t device = w.get_device_index();
  const OnDevice guard(device);
  with_class(dtype_of(w), call.access.head_dim, [&](auto dim, auto zero) {
    using T = decltype(zero);
    constexpr int kDim = dim;
    constexpr Tiles t = kBackward<kDim>;
    const Launch l = launch_of(call, device, 16 * t.rows, 2 * kDim * sizeof(T), 2 * others_bytes<kDim>(t.columns));
    launch_shift<T, kDim>(call, l);
    launch<mma_backward_kernel<T, kDim, t.rows, t.columns, t.held>>(l, call);
  });
}

// Whether the kernels here take a call; what they refuse is another path's.
bool takes(Tensor w) {
  const Dtype dtype = dtype_of(w);
  const int32_t device = w.get_device_index();
  return dtype != Dtype::f32 && w.size(w.dim() - 1) <= kMostHeadDim && compute_capability(device) >= 80 &&
         shared_limit(device) >= 99 * 1024;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "cuda_mssa_fwd(Tensor w, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, int max_seqlen, "
      "bool causal, float scale, float dropout_p, float threshold, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "cuda_mssa_bwd(Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, Tensor? key_padding_mask, "
      "Tensor? cu_seqlens, Tensor? seed, int max_seqlen, bool causal, float scale, float dropout_p, float threshold, "
      "Tensor(a!) shift, Tensor(b!) dw) -> ()");
  m.def(
      "cuda_mssa_prefill(Tensor w, Tensor data, Tensor lengths, Tensor? key_padding_mask, float scale, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def("cuda_mssa_takes(Tensor w) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CRATE_DEVICE_KEY, m) {
  m.impl("cuda_mssa_fwd", TORCH_BOX(&forward));
  m.impl("cuda_mssa_bwd", TORCH_BOX(&backward));
  m.impl("cuda_mssa_prefill", TORCH_BOX(&prefill));
  m.impl("cuda_mssa_takes", TORCH_BOX(&takes));
}

}  // namespace crate_kernels
