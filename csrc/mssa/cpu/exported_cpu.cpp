// Subspace attention in programs without Python: common/cpu/exported.h.
#include "../../common/cpu/exported.h"
#include "../call.h"

namespace crate_kernels {
namespace {

// The options as the package's schema has them, where the scale may be open.
struct ExportedCall {
  MssaCall call;
  bool scaled;
};

std::tuple<Tensor, Tensor> forward(Tensor w, ExportedCall exported, std::string backend) {
  check_backend("mssa", backend);
  const MssaCall& call = exported.call;
  const Tensor out = empty_out(w), lse = empty_rows(w);
  const auto head_dim = static_cast<double>(std::max<int64_t>(w.size(w.dim() - 1), 1));
  const double scale = exported.scaled ? call.scale : 1.0 / std::sqrt(head_dim);
  run_kernel("mssa_fwd", w, contiguous(call.key_padding_mask), contiguous(call.cu_seqlens), call.max_seqlen,
             contiguous(call.seed), call.mask.causal, scale, call.dropout_p, call.threshold, out, lse);
  return {out, lse};
}

}  // namespace

template <>
inline ExportedCall Arguments::take<ExportedCall>() {
  using Optional = std::optional<Tensor>;
  ExportedCall exported = {{take<Optional>(), take<Optional>(), take<int64_t>(), take<Optional>(), {take<bool>()}},
                           true};
  const auto scale = take<std::optional<double>>();
  exported.scaled = scale.has_value();
  exported.call.scale = scale.value_or(1.0);
  exported.call.dropout_p = take<double>();
  exported.call.threshold = take<std::optional<double>>();
  return exported;
}

namespace {

const int kForward = add_exported(
    {"mssa_fwd(Tensor w, Tensor? key_padding_mask, Tensor? cu_seqlens, SymInt max_seqlen, Tensor? seed, bool causal, "
     "float? scale, float dropout_p, float? threshold, str backend) -> (Tensor, Tensor)",
     CRATE_BOX(&forward)});

}  // namespace
}  // namespace crate_kernels
