// The options of a call of subspace attention, as listed in crate_kernels/ops/mssa/call.py, and the ops of either
// device.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "../common/box.h"
#include "../common/tensor.h"
#include "mask.h"

namespace crate_kernels {

struct MssaCall {
  std::optional<Tensor> key_padding_mask, cu_seqlens;
  int64_t max_seqlen = 0;
  std::optional<Tensor> seed;
  mssa::Mask mask;
  double scale = 1.0, dropout_p = 0.0;
  std::optional<double> threshold;

  bool packed() const { return cu_seqlens.has_value(); }
  int64_t sequences(const Tensor& w) const { return packed() ? cu_seqlens->size(0) - 1 : w.size(0); }
  // The least Philox word that dropout keeps, and the factor of the kept weights.
  uint64_t keep_from() const { return static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0)); }
  float keep_factor() const { return static_cast<float>(1.0 / (1.0 - dropout_p)); }
};

template <>
inline MssaCall Arguments::take<MssaCall>() {
  using Optional = std::optional<Tensor>;
  return {take<Optional>(), take<Optional>(), take<int64_t>(), take<Optional>(),
          {take<bool>()},   take<double>(),   take<double>(),  take<std::optional<double>>()};
}

struct MssaDecodeCall {
  std::optional<Tensor> key_padding_mask;
  int64_t bound;
  bool uniform;
  double scale;
  bool need_lse;

  // The attention of the new tokens to the cache.
  MssaCall attention() const { return {key_padding_mask, {}, 0, {}, mssa::cache_mask(), scale, 0.0, {}}; }
};

template <>
inline MssaDecodeCall Arguments::take<MssaDecodeCall>() {
  return {take<std::optional<Tensor>>(), take<int64_t>(), take<bool>(), take<double>(), take<bool>()};
}

// Tensors among the options, lse and dlse are contiguous. CUDA ops take workspaces after these arguments.
#define CRATE_MSSA_CALL                                                                                    \
  "Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, bool causal, float scale, " \
  "float dropout_p, float? threshold"
#define CRATE_MSSA_DECODE_CALL "Tensor? key_padding_mask, int bound, bool uniform, float scale, bool need_lse"
#define CRATE_MSSA_FWD "Tensor w, " CRATE_MSSA_CALL ", Tensor(a!) out, Tensor(b!) lse"
#define CRATE_MSSA_BWD \
  "Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, " CRATE_MSSA_CALL ", Tensor(a!) dw"
#define CRATE_MSSA_DECODE \
  "Tensor w, Tensor(a!) data, Tensor(b!) lengths, " CRATE_MSSA_DECODE_CALL ", Tensor(c!) out, Tensor(d!) lse"

}  // namespace crate_kernels
