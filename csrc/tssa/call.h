// A call of token statistics: its options, as listed in crate_kernels/ops/tssa/call.py, and its tensors.
#pragma once

#include <cmath>
#include <optional>

#include "../common/box.h"
#include "../common/tensor.h"

namespace crate_kernels {

struct TssaCall {
  std::optional<Tensor> key_padding_mask = {}, cu_seqlens = {};
  int64_t max_seqlen = 0;
  std::optional<Tensor> seed = {};
  double dropout_p = 0.0;
  int64_t sums_every = 0;  // of CUDA kernels

  bool packed() const { return cu_seqlens.has_value(); }
  int64_t nsequences(const Tensor& w) const { return packed() ? cu_seqlens->size(0) - 1 : w.size(0); }
  // The smallest Philox word that dropout keeps, and the factor of the kept values.
  uint64_t keep_from() const { return static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0)); }
  float keep_factor() const { return static_cast<float>(1.0 / (1.0 - dropout_p)); }
};

template <>
inline TssaCall Arguments::take<TssaCall>() {
  using Optional = std::optional<Tensor>;
  return {take<Optional>(), take<Optional>(), take<int64_t>(), take<Optional>(), take<double>(), take<int64_t>()};
}

// A forward. `energy` and `moment`: results of the full form; with `mass` and `lengths`, the state of a cache, whose
// sums the call advances.
struct TssaForwardArgs {
  bool causal;
  Tensor w, temp;
  std::optional<Tensor> denom_bias;
  TssaCall call;
  Tensor out, membership;
  std::optional<Tensor> energy, moment, mass, lengths;
};

template <>
inline TssaForwardArgs Arguments::take<TssaForwardArgs>() {
  using Optional = std::optional<Tensor>;
  return {take<bool>(),   take<Tensor>(),   take<Tensor>(),   take<Optional>(), take<TssaCall>(), take<Tensor>(),
          take<Tensor>(), take<Optional>(), take<Optional>(), take<Optional>(), take<Optional>()};
}

// A backward. `energy` and `moment`: of the full form.
struct TssaBackwardArgs {
  bool causal;
  Tensor dout;
  std::optional<Tensor> dmembership;
  Tensor w, temp;
  std::optional<Tensor> denom_bias;
  Tensor membership;
  std::optional<Tensor> energy, moment;
  TssaCall call;
  Tensor dw, dtemp;
  std::optional<Tensor> ddenom_bias;
};

template <>
inline TssaBackwardArgs Arguments::take<TssaBackwardArgs>() {
  using Optional = std::optional<Tensor>;
  return {take<bool>(),     take<Tensor>(), take<Optional>(), take<Tensor>(),   take<Tensor>(),
          take<Optional>(), take<Tensor>(), take<Optional>(), take<Optional>(), take<TssaCall>(),
          take<Tensor>(),   take<Tensor>(), take<Optional>()};
}

#define CRATE_TSSA_CALL \
  "Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, float dropout_p, int sums_every"
#define CRATE_TSSA_FWD                                                                                              \
  "tssa_fwd(bool causal, Tensor w, Tensor temp, Tensor? denom_bias, " CRATE_TSSA_CALL                               \
  ", Tensor(a!) out, Tensor(b!) membership, Tensor(c!)? energy, Tensor(d!)? moment, Tensor(e!)? mass, Tensor(f!)? " \
  "lengths) -> ()"
#define CRATE_TSSA_BWD                                                                                         \
  "tssa_bwd(bool causal, Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, Tensor " \
  "membership, Tensor? energy, Tensor? moment, " CRATE_TSSA_CALL                                               \
  ", Tensor(a!) dw, Tensor(b!) dtemp, Tensor(c!)? ddenom_bias) -> ()"

}  // namespace crate_kernels
