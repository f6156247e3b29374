// The options of a call of subspace attention, as listed in crate_kernels/ops/mssa/call.py, and its ops.
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
  // The smallest Philox word that dropout keeps, and the factor of the kept weights.
  uint64_t keep_from() const { return static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0)); }
  float keep_factor() const { return static_cast<float>(1.0 / (1.0 - dropout_p)); }
};

template <>
inline MssaCall Arguments::take<MssaCall>() {
  using Optional = std::optional<Tensor>;
  return {take<Optional>(), take<Optional>(), take<int64_t>(), take<Optional>(),
          {take<bool>()},   take<double>(),   take<double>(),  take<std::optional<double>>()};
}

// Attention of some tokens of a sequence to others: crate_kernels/ops/mssa/rectangular/call.py.
struct MssaRectangularCall {
  std::optional<Tensor> row_mask, column_mask;
  int64_t row_start, column_start;
  mssa::Mask mask;
  double scale;
  std::optional<Tensor> seed;
  double dropout_p;
  int64_t first_head, nheads;

  MssaCall attention() const { return {{}, {}, 0, seed, mask, scale, dropout_p, {}}; }
  // The number of a head among all heads of all sequences, for dropout.
  uint32_t counter(int64_t batch, int64_t head, int64_t here) const {
    return static_cast<uint32_t>(batch * (nheads > 0 ? nheads : here) + first_head + head);
  }
};

template <>
inline MssaRectangularCall Arguments::take<MssaRectangularCall>() {
  using Optional = std::optional<Tensor>;
  return {take<Optional>(), take<Optional>(), take<int64_t>(), take<int64_t>(), {take<bool>()},
          take<double>(),   take<Optional>(), take<double>(),  take<int64_t>(), take<int64_t>()};
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

// Tensors among the options, lse, dlse and delta are contiguous.
#define CRATE_MSSA_CALL                                                                                    \
  "Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, bool causal, float scale, " \
  "float dropout_p, float? threshold"
#define CRATE_MSSA_RECTANGULAR_CALL                                                                    \
  "Tensor? row_mask, Tensor? column_mask, int row_start, int column_start, bool causal, float scale, " \
  "Tensor? seed, float dropout_p, int first_head, int nheads"
#define CRATE_MSSA_DECODE_CALL "Tensor? key_padding_mask, int bound, bool uniform, float scale, bool need_lse"
#define CRATE_MSSA_FWD "Tensor w, " CRATE_MSSA_CALL ", Tensor(a!) out, Tensor(b!) lse"
#define CRATE_MSSA_BWD \
  "Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, " CRATE_MSSA_CALL ", Tensor(a!) dw"
// The results of rectangular ops are contiguous and fp32.
#define CRATE_MSSA_RECTANGULAR_FWD \
  "Tensor rows, Tensor columns, " CRATE_MSSA_RECTANGULAR_CALL ", Tensor(a!) out, Tensor(b!) lse"
#define CRATE_MSSA_RECTANGULAR_DELTA "Tensor dout, Tensor out, Tensor(a!) delta"
#define CRATE_MSSA_RECTANGULAR_BWD                                                                        \
  "Tensor rows, Tensor dout, Tensor lse, Tensor delta, Tensor dlse, Tensor columns, Tensor column_dout, " \
  "Tensor column_lse, Tensor column_delta, Tensor column_dlse, " CRATE_MSSA_RECTANGULAR_CALL ", Tensor(a!) dw"
#define CRATE_MSSA_DECODE \
  "Tensor w, Tensor(a!) data, Tensor(b!) lengths, " CRATE_MSSA_DECODE_CALL ", Tensor(c!) out, Tensor(d!) lse"

}  // namespace crate_kernels
