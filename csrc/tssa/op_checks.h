// Checks of the tensors that the ops of token statistics take: call.h has the schemas.
#pragma once

#include <algorithm>
#include <utility>

#include "../common/op_checks.h"
#include "call.h"

namespace crate_kernels {

// Sizes of a call.
struct TssaExtent {
  bool packed;
  int64_t sequences, nheads, seqlen, head_dim;  // packed: seqlen is the number of rows

  Sizes tokens() const { return packed ? Sizes{seqlen, nheads, head_dim} : Sizes{sequences, nheads, seqlen, head_dim}; }
  Sizes rows() const { return packed ? Sizes{nheads, seqlen} : Sizes{sequences, nheads, seqlen}; }
  Sizes channels() const { return {sequences, nheads, head_dim}; }
};

// Checks what a forward and a backward have in common.
template <class Args>
TssaExtent check_tssa_call(const OpChecks& checks, const Args& t) {
  const bool packed = t.call.packed();
  checks.rank("w", t.w, packed ? 3 : 4);
  if (t.call.key_padding_mask.has_value()) {  // in any strides, unlike the other options
    checks.strided("key_padding_mask", t.call.key_padding_mask, ScalarType::Bool, {t.w.size(0), t.w.size(2)});
  }
  checks.options({}, t.call.cu_seqlens, t.call.seed, 0, 0);
  TssaExtent e = {packed, t.call.nsequences(t.w), t.w.size(1), t.w.size(packed ? 0 : 2), t.w.size(packed ? 2 : 3)};
  checks.numbers("temp", t.temp, {e.nheads});
  checks.numbers("membership", t.membership, e.rows());
  if (!t.causal) {
    checks.present("energy", t.energy);
    checks.present("moment", t.moment);
    checks.numbers("energy", t.energy, e.channels());
    checks.numbers("moment", t.moment, e.channels());
  }
  if (!t.denom_bias.has_value()) return e;
  checks.rank("denom_bias", *t.denom_bias, 2);
  checks.numbers("denom_bias", t.denom_bias, {e.nheads, t.denom_bias->size(1)});
  return e;
}

// Requires a bias to cover so many tokens.
inline void check_tssa_bias(const OpChecks& checks, const std::optional<Tensor>& denom_bias, const TssaExtent& e,
                            int64_t tokens) {
  if (!denom_bias.has_value() || denom_bias->size(1) >= tokens) return;
  checks.numbers("denom_bias", denom_bias, {e.nheads, tokens});
}

template <class Args>
int64_t longest_sequence(const Args& t, const TssaExtent& e) {
  return e.packed ? t.call.max_seqlen : e.seqlen;
}

inline void check_tssa_forward(const TssaForwardArgs& t) {
  const OpChecks checks("tssa", "w", t.w);
  const TssaExtent e = check_tssa_call(checks, t);
  checks.strided("out", t.out, t.w.scalar_type(), e.tokens());
  const bool state = t.lengths.has_value();
  if (state || (t.causal && t.energy.has_value())) {
    for (const auto& [name, sum] : {std::pair{"cache.energy", &t.energy},
                                    {"cache.weighted", &t.moment},
                                    {"cache.mass", &t.mass},
                                    {"cache.lengths", &t.lengths}}) {
      checks.present(name, *sum);
    }
    checks.contiguous("cache.energy", t.energy, ScalarType::Double, e.channels());
    checks.contiguous("cache.weighted", t.moment, ScalarType::Double, e.channels());
    checks.contiguous("cache.mass", t.mass, ScalarType::Double, {e.sequences, e.nheads});
    checks.contiguous("cache.lengths", t.lengths, ScalarType::Int, {e.sequences});
  }
  check_tssa_bias(checks, t.denom_bias, e, state ? std::min<int64_t>(e.seqlen, 1) : longest_sequence(t, e));
}

inline void check_tssa_backward(const TssaBackwardArgs& t) {
  const OpChecks checks("tssa backward", "w", t.w);
  const TssaExtent e = check_tssa_call(checks, t);
  checks.strided("dout", t.dout, t.w.scalar_type(), e.tokens());
  checks.numbers("dmembership", t.dmembership, e.rows());
  checks.strided("dw", t.dw, t.w.scalar_type(), e.tokens());
  checks.numbers("dtemp", t.dtemp, {e.nheads});
  check_tssa_bias(checks, t.denom_bias, e, longest_sequence(t, e));
  if (t.denom_bias.has_value()) {
    checks.present("ddenom_bias", t.ddenom_bias);
    checks.numbers("ddenom_bias", t.ddenom_bias, {e.nheads, t.denom_bias->size(1)});
  }
}

}  // namespace crate_kernels
