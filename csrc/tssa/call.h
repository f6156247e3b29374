// The options of a call of token statistics, as listed in crate_kernels/ops/tssa/call.py, and the ops of either device.
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

  bool packed() const { return cu_seqlens.has_value(); }
  int64_t nsequences(const Tensor& w) const { return packed() ? cu_seqlens->size(0) - 1 : w.size(0); }
  // The least Philox word that dropout keeps, and the factor of the kept values.
  uint64_t keep_from() const { return static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0)); }
  float keep_factor() const { return static_cast<float>(1.0 / (1.0 - dropout_p)); }
};

template <>
inline TssaCall Arguments::take<TssaCall>() {
  return {take<std::optional<Tensor>>(), take<std::optional<Tensor>>(), take<int64_t>(), take<std::optional<Tensor>>(),
          take<double>()};
}

#define CRATE_TSSA_CALL "Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, float dropout_p"
// Arguments that CPU and CUDA ops share. CUDA ops take workspaces after them.
#define CRATE_TSSA_FWD                      \
  "Tensor w, Tensor temp, " CRATE_TSSA_CALL \
  ", Tensor(a!) out, Tensor(b!) membership, Tensor(c!) energy, Tensor(d!) moment"
#define CRATE_TSSA_BWD                                                                                 \
  "Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy, Tensor " \
  "moment, " CRATE_TSSA_CALL ", Tensor(a!) dw, Tensor(b!) dtemp"
#define CRATE_TSSA_CAUSAL_FWD \
  "Tensor w, Tensor temp, Tensor? denom_bias, " CRATE_TSSA_CALL ", Tensor(a!) out, Tensor(b!) membership"
#define CRATE_TSSA_CAUSAL_BWD                                                                                        \
  "Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, Tensor membership, " CRATE_TSSA_CALL \
  ", Tensor(a!) dw, Tensor(b!)? dtemp, Tensor(c!)? ddenom_bias"
#define CRATE_TSSA_DECODE                                                                                \
  "Tensor w, Tensor temp, Tensor? denom_bias, Tensor(a!) energy, Tensor(b!) weighted, Tensor(c!) mass, " \
  "Tensor(d!) lengths, Tensor? key_padding_mask, Tensor(e!) out, Tensor(f!) membership"

}  // namespace crate_kernels
