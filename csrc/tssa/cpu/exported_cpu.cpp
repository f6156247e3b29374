// Token statistics in programs without Python: common/cpu/exported.h.
#include "../../common/cpu/exported.h"
#include "../call.h"

namespace crate_kernels {
namespace {

using Optional = std::optional<Tensor>;

// A parameter as kernels read it: contiguous numbers in float32.
Tensor plain(const Tensor& t) {
  return torch::stable::contiguous(cast(t, ScalarType::Float));
}

Tensor empty_channels(const Tensor& w, const TssaCall& call) {
  return torch::stable::new_empty(w, {call.nsequences(w), w.size(1), w.size(w.dim() - 1)}, ScalarType::Float);
}

std::tuple<Tensor, Tensor> run(bool causal, const Tensor& w, const Tensor& temp, const Optional& denom_bias,
                               const TssaCall& call, const Optional& energy, const Optional& moment) {
  const Tensor out = empty_out(w), membership = empty_rows(w);
  const Optional bias = denom_bias.has_value() ? Optional(plain(*denom_bias)) : Optional(), none;
  run_kernel("tssa_fwd", causal, w, plain(temp), bias, contiguous(call.key_padding_mask), contiguous(call.cu_seqlens),
             call.max_seqlen, contiguous(call.seed), call.dropout_p, call.sums_every, out, membership, energy, moment,
             none, none);
  return {out, membership};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(Tensor w, Tensor temp, TssaCall call, std::string backend) {
  check_backend("tssa", backend);
  const Tensor energy = empty_channels(w, call), moment = empty_channels(w, call);
  const auto [out, membership] = run(false, w, temp, {}, call, energy, moment);
  return {out, membership, energy, moment};
}

// No sums: only a backward reads them, and Python has that.
Tensor empty_sums(const Tensor& w, const TssaCall& call) {
  if (call.sums_every != 0)
    throw std::runtime_error("tssa: sums_every must be 0 without Python, got " + std::to_string(call.sums_every));
  const int64_t nheads = w.size(1), width = nheads * w.size(w.dim() - 1);
  return torch::stable::new_empty(w, {call.nsequences(w), 0, (width + nheads + 3) / 4 * 4 + width}, ScalarType::Float);
}

std::tuple<Tensor, Tensor, Tensor> forward_causal(Tensor w, Tensor temp, Optional denom_bias, TssaCall call,
                                                  std::string backend) {
  check_backend("tssa", backend);
  const auto [out, membership] = run(true, w, temp, denom_bias, call, {}, {});
  return {out, membership, empty_sums(w, call)};
}

#define CRATE_TSSA_EXPORTED_CALL                                                                     \
  "Tensor? key_padding_mask, Tensor? cu_seqlens, SymInt max_seqlen, Tensor? seed, float dropout_p, " \
  "SymInt sums_every, str backend"

const int kForward =
    add_exported({"tssa_fwd(Tensor w, Tensor temp, " CRATE_TSSA_EXPORTED_CALL ") -> (Tensor, Tensor, Tensor, Tensor)",
                  CRATE_BOX(&forward)});
const int kCausal = add_exported({"tssa_causal_fwd(Tensor w, Tensor temp, Tensor? denom_bias, " CRATE_TSSA_EXPORTED_CALL
                                  ") -> (Tensor, Tensor, Tensor)",
                                  CRATE_BOX(&forward_causal)});

}  // namespace
}  // namespace crate_kernels
