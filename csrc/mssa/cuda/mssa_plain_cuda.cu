// The CUDA ops of subspace attention by fp32 products: any dtype, head_dim to 256, every argument, every GPU.
#include "plain_backward.cuh"
#include "plain_forward.cuh"

namespace crate_kernels {
namespace {

using plain::Call;

// Chunks of the output that a block accumulates at once.
constexpr int kMostChunks = 2;

// What the forward and the backward have in common.
Call call_of(const Tensor& w, const std::optional<Tensor>& key_padding_mask, const std::optional<Tensor>& cu_seqlens,
             int64_t max_seqlen, const std::optional<Tensor>& seed, bool causal, double scale, double dropout_p,
             double threshold) {
  const bool packed = cu_seqlens.has_value();
  Call c = {};
  c.w = c.keys = rows_of(w, packed);
  c.dtype = dtype_of(w);
  c.head_dim = head_dim_of(w);
  c.nheads = static_cast<int>(w.size(1));
  c.sequences = static_cast<int>(packed ? cu_seqlens->size(0) - 1 : w.size(0));
  c.total = packed ? w.size(0) : 0;
  c.seqlen = static_cast<int>(packed ? max_seqlen : w.size(2));
  c.blocks = c.seqlen > 0 ? (c.seqlen + plain::kOwned - 1) / plain::kOwned : 1;
  constexpr int kWidth = kMostChunks * plain::kChunk;
  c.groups = (c.head_dim + kWidth - 1) / kWidth;
  c.keep = pointer<const bool>(key_padding_mask);
  c.cu_seqlens = pointer<const int32_t>(cu_seqlens);
  c.seed = pointer<const int64_t>(seed);
  c.keep_from = static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0));
  c.keep_factor = seed.has_value() ? static_cast<float>(1.0 / (1.0 - dropout_p)) : 1.0f;
  c.scale = static_cast<float>(scale);
  c.threshold = static_cast<float>(threshold);
  c.causal = causal;
  return c;
}

Launch launch_of(const Call& c, const Tensor& w, int64_t shared_bytes) {
  Launch l = {static_cast<int64_t>(c.sequences) * c.nheads * c.blocks * c.groups, plain::kThreads, shared_bytes};
  l.stream = current_stream(w.get_device_index());
  return l;
}

bool one_chunk(const Call& c) {
  return c.head_dim <= plain::kChunk;
}

void launch_forward(const Call& c, const Tensor& w) {
  const Launch l = launch_of(c, w, plain::kForwardShared);
  if (one_chunk(c)) return launch<plain::mssa_plain_fwd_kernel<1>>(l, c);
  launch<plain::mssa_plain_fwd_kernel<kMostChunks>>(l, c);
}

// lse and dlse are contiguous, and so are key_padding_mask and cu_seqlens.
void forward(Tensor w, std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens, int64_t max_seqlen,
             std::optional<Tensor> seed, bool causal, double scale, double dropout_p, double threshold, Tensor out,
             Tensor lse) {
  const OnDevice device(w.get_device_index());
  Call c = call_of(w, key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold);
  c.out = rows_of(out, cu_seqlens.has_value());
  c.lse = static_cast<float*>(lse.data_ptr());
  launch_forward(c, w);
}

// `delta` is scratch of the size of lse.
void backward(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor w, Tensor out, Tensor lse,
              std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens, int64_t max_seqlen,
              std::optional<Tensor> seed, bool causal, double scale, double dropout_p, double threshold, Tensor delta,
              Tensor dw) {
  const OnDevice device(w.get_device_index());
  const bool packed = cu_seqlens.has_value();
  Call c = call_of(w, key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold);
  c.out = rows_of(out, packed);
  c.g = dout.has_value() ? rows_of(*dout, packed) : c.w;
  c.dw = rows_of(dw, packed);
  c.lse = static_cast<float*>(lse.data_ptr());
  c.delta = static_cast<float*>(delta.data_ptr());
  c.dlse = pointer<const float>(dlse);
  // The selection of phi = "threshold" is piecewise constant: its scores get a gradient from lse alone.
  c.values = dout.has_value();
  c.products = c.values && threshold < 0;
  c.scores = c.products || dlse.has_value();
  if (c.products) {
    Launch l = launch_of(c, w, c.seed == nullptr ? plain::kDeltaShared : plain::kDropoutDeltaShared);
    l.grid /= c.groups;
    if (c.seed == nullptr) {
      launch<plain::mssa_plain_delta_kernel>(l, c);
    } else {
      launch<plain::mssa_plain_dropout_delta_kernel>(l, c);
    }
  }
  const Launch l = launch_of(c, w, plain::kBackwardShared);
  if (one_chunk(c)) return launch<plain::mssa_plain_bwd_kernel<1>>(l, c);
  launch<plain::mssa_plain_bwd_kernel<kMostChunks>>(l, c);
}

// Attend over a cache to which `w` was appended, but whose lengths are still those of before.
void prefill(Tensor w, Tensor data, Tensor lengths, std::optional<Tensor> key_padding_mask, double scale, Tensor out,
             Tensor lse) {
  const OnDevice device(w.get_device_index());
  Call c = call_of(w, key_padding_mask, std::nullopt, 0, std::nullopt, true, scale, 0.0, -1.0);
  c.keys = rows_of(data, false);
  c.out = rows_of(out, false);
  c.lse = lse.numel() > 0 ? static_cast<float*>(lse.data_ptr()) : nullptr;
  c.held = static_cast<const int32_t*>(lengths.data_ptr());
  c.capacity = static_cast<int>(data.size(2));
  launch_forward(c, w);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "cuda_mssa_plain_fwd(Tensor w, Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, "
      "bool causal, float scale, float dropout_p, float threshold, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "cuda_mssa_plain_bwd(Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, Tensor? key_padding_mask, "
      "Tensor? cu_seqlens, int max_seqlen, Tensor? seed, bool causal, float scale, float dropout_p, float threshold, "
      "Tensor(a!) delta, Tensor(b!) dw) -> ()");
  m.def(
      "cuda_mssa_plain_prefill(Tensor w, Tensor data, Tensor lengths, Tensor? key_padding_mask, float scale, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CRATE_DEVICE_KEY, m) {
  m.impl("cuda_mssa_plain_fwd", TORCH_BOX(&forward));
  m.impl("cuda_mssa_plain_bwd", TORCH_BOX(&backward));
  m.impl("cuda_mssa_plain_prefill", TORCH_BOX(&prefill));
}

}  // namespace crate_kernels
