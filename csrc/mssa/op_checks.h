// Checks of the tensors that the ops of subspace attention take: call.h has the schemas.
#pragma once

#include <utility>

#include "../common/op_checks.h"
#include "call.h"

namespace crate_kernels::mssa {

// Sizes of a tensor of tokens, and of its numbers per head and token.
struct Extent {
  bool packed;
  int64_t batch, nheads, seqlen, head_dim;  // packed: batch is not used, seqlen is the number of rows

  Sizes tokens() const { return packed ? Sizes{seqlen, nheads, head_dim} : Sizes{batch, nheads, seqlen, head_dim}; }
  Sizes rows() const { return packed ? Sizes{nheads, seqlen} : Sizes{batch, nheads, seqlen}; }
};

inline Extent extent_of(const OpChecks& checks, const char* name, const Tensor& w, bool packed) {
  checks.rank(name, w, packed ? 3 : 4);
  if (packed) return {true, 0, w.size(1), w.size(0), w.size(2)};
  return {false, w.size(0), w.size(1), w.size(2), w.size(3)};
}

inline Extent check_call(const OpChecks& checks, const Tensor& w, const MssaCall& call) {
  const Extent e = extent_of(checks, "w", w, call.packed());
  checks.options(call.key_padding_mask, call.cu_seqlens, call.seed, e.batch, e.seqlen);
  return e;
}

inline void check_forward(const Tensor& w, const MssaCall& call, const Tensor& out, const Tensor& lse) {
  const OpChecks checks("mssa", "w", w);
  const Extent e = check_call(checks, w, call);
  checks.strided("out", out, w.scalar_type(), e.tokens());
  checks.numbers("lse", lse, e.rows());
}

inline void check_backward(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse, const Tensor& w,
                           const Tensor& out, const Tensor& lse, const MssaCall& call, const Tensor& dw) {
  const OpChecks checks("mssa backward", "w", w);
  const Extent e = check_call(checks, w, call);
  checks.strided("dout", dout, w.scalar_type(), e.tokens());
  checks.numbers("dlse", dlse, e.rows());
  checks.strided("out", out, w.scalar_type(), e.tokens());
  checks.numbers("lse", lse, e.rows());
  checks.strided("dw", dw, w.scalar_type(), e.tokens());
}

inline void check_decode(const Tensor& w, const Tensor& data, const Tensor& lengths, const MssaDecodeCall& call,
                         const Tensor& out, const Tensor& lse) {
  const OpChecks checks("mssa", "w", w);
  const Extent e = extent_of(checks, "w", w, false);
  checks.options(call.key_padding_mask, {}, {}, e.batch, e.seqlen);
  checks.rank("cache.data", data, 4);
  checks.strided("cache.data", data, w.scalar_type(), {e.batch, e.nheads, data.size(2), e.head_dim});
  checks.contiguous("cache.lengths", lengths, ScalarType::Int, {e.batch});
  checks.strided("out", out, w.scalar_type(), e.tokens());
  if (call.need_lse) checks.numbers("lse", lse, e.rows());
}

// Tokens of a range, and what a backward takes of them.
struct RangeTensors {
  const Tensor &w, &dout, &lse, &delta, &dlse;
};

// Returns the extents of rows and of columns.
inline std::pair<Extent, Extent> check_rectangle(const OpChecks& checks, const Tensor& rows, const Tensor& columns,
                                                 const MssaRectangularCall& call) {
  const Extent own = extent_of(checks, "rows", rows, false);
  const Extent others = extent_of(checks, "columns", columns, false);
  checks.strided("columns", columns, rows.scalar_type(), {own.batch, own.nheads, others.seqlen, own.head_dim});
  checks.contiguous("row_mask", call.row_mask, ScalarType::Bool, {own.batch, own.seqlen});
  checks.contiguous("column_mask", call.column_mask, ScalarType::Bool, {own.batch, others.seqlen});
  checks.contiguous("seed", call.seed, ScalarType::Long, {});
  return {own, others};
}

inline void check_rectangular_forward(const Tensor& rows, const Tensor& columns, const MssaRectangularCall& call,
                                      const Tensor& out, const Tensor& lse) {
  const OpChecks checks("mssa", "rows", rows);
  const Extent own = check_rectangle(checks, rows, columns, call).first;
  checks.numbers("out", out, own.tokens());
  checks.numbers("lse", lse, own.rows());
}

inline void check_rectangular_backward(const RangeTensors& rows, const RangeTensors& columns,
                                       const MssaRectangularCall& call, const Tensor& dw) {
  const OpChecks checks("mssa backward", "rows", rows.w);
  const ScalarType dtype = rows.w.scalar_type();
  const auto [own, others] = check_rectangle(checks, rows.w, columns.w, call);
  checks.strided("dout", rows.dout, dtype, own.tokens());
  checks.numbers("lse", rows.lse, own.rows());
  checks.numbers("delta", rows.delta, own.rows());
  checks.numbers("dlse", rows.dlse, own.rows());
  checks.strided("column_dout", columns.dout, dtype, others.tokens());
  checks.numbers("column_lse", columns.lse, others.rows());
  checks.numbers("column_delta", columns.delta, others.rows());
  checks.numbers("column_dlse", columns.dlse, others.rows());
  checks.numbers("dw", dw, own.tokens());
}

inline void check_delta(const Tensor& dout, const Tensor& out, const Tensor& delta) {
  const OpChecks checks("mssa backward", "dout", dout);
  const Extent e = extent_of(checks, "dout", dout, false);
  checks.strided("out", out, dout.scalar_type(), e.tokens());
  checks.numbers("delta", delta, e.rows());
}

}  // namespace crate_kernels::mssa
