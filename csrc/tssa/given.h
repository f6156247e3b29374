// Checks of the tensors that the ops of token statistics take: call.h has the schemas.
#pragma once

#include <algorithm>
#include <utility>

#include "../common/given.h"
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
TssaExtent check_tssa_call(const Given& given, const Args& t) {
  const bool packed = t.call.packed();
  given.rank("w", t.w, packed ? 3 : 4);
  if (t.call.key_padding_mask.has_value()) {  // in any strides, unlike the other options
    given.strided("key_padding_mask", t.call.key_padding_mask, ScalarType::Bool, {t.w.size(0), t.w.size(2)});
  }
  given.options({}, t.call.cu_seqlens, t.call.seed, 0, 0);
  TssaExtent e = {packed, t.call.nsequences(t.w), t.w.size(1), t.w.size(packed ? 0 : 2), t.w.size(packed ? 2 : 3)};
  given.numbers("temp", t.temp, {e.nheads});
  given.numbers("membership", t.membership, e.rows());
  if (!t.causal) {
    given.present("energy", t.energy);
    given.present("moment", t.moment);
    given.numbers("energy", t.energy, e.channels());
    given.numbers("moment", t.moment, e.channels());
  }
  if (!t.denom_bias.has_value()) return e;
  given.rank("denom_bias", *t.denom_bias, 2);
  given.numbers("denom_bias", t.denom_bias, {e.nheads, t.denom_bias->size(1)});
  return e;
}

// The tokens that a bias has to cover.
inline void check_tssa_bias(const Given& given, const std::optional<Tensor>& denom_bias, const TssaExtent& e,
                            int64_t tokens) {
  if (!denom_bias.has_value() || denom_bias->size(1) >= tokens) return;
  given.numbers("denom_bias", denom_bias, {e.nheads, tokens});
}

inline void check_tssa_forward(const TssaForwardArgs& t) {
  const Given given("tssa", "w", t.w);
  const TssaExtent e = check_tssa_call(given, t);
  given.strided("out", t.out, t.w.scalar_type(), e.tokens());
  const bool state = t.lengths.has_value();
  if (state || (t.causal && t.energy.has_value())) {
    for (const auto& [name, sum] : {std::pair{"cache.energy", &t.energy},
                                    {"cache.weighted", &t.moment},
                                    {"cache.mass", &t.mass},
                                    {"cache.lengths", &t.lengths}}) {
      given.present(name, *sum);
    }
    given.contiguous("cache.energy", t.energy, ScalarType::Double, e.channels());
    given.contiguous("cache.weighted", t.moment, ScalarType::Double, e.channels());
    given.contiguous("cache.mass", t.mass, ScalarType::Double, {e.sequences, e.nheads});
    given.contiguous("cache.lengths", t.lengths, ScalarType::Int, {e.sequences});
  }
  check_tssa_bias(given, t.denom_bias, e, state || e.packed ? std::min<int64_t>(e.seqlen, 1) : e.seqlen);
}

inline void check_tssa_backward(const TssaBackwardArgs& t) {
  const Given given("tssa backward", "w", t.w);
  const TssaExtent e = check_tssa_call(given, t);
  given.strided("dout", t.dout, t.w.scalar_type(), e.tokens());
  given.numbers("dmembership", t.dmembership, e.rows());
  given.strided("dw", t.dw, t.w.scalar_type(), e.tokens());
  given.numbers("dtemp", t.dtemp, {e.nheads});
  check_tssa_bias(given, t.denom_bias, e, e.packed ? std::min<int64_t>(e.seqlen, 1) : e.seqlen);
  if (t.denom_bias.has_value()) {
    given.present("ddenom_bias", t.ddenom_bias);
    given.numbers("ddenom_bias", t.ddenom_bias, {e.nheads, t.denom_bias->size(1)});
  }
}

}  // namespace crate_kernels
