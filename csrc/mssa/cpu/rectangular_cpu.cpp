// The CPU ops of attention of some tokens of a sequence, the rows, to others, the columns.
#include <algorithm>
#include <vector>

#include "../op_checks.h"
#include "host.h"

namespace crate_kernels {
namespace {

constexpr int64_t kBlock = 64;  // rows of a tile

// A range of tokens. dout, lse, delta and dlse are null for a forward.
struct TokenRange {
  const Tensor& w;
  const Tensor *dout, *lse, *delta, *dlse;
  const std::optional<Tensor>& mask;
  int64_t start;

  int64_t tokens() const { return w.size(2); }
  bool operator==(const TokenRange& other) const {
    if (w.data_ptr() != other.w.data_ptr() || start != other.start || mask.has_value() != other.mask.has_value()) {
      return false;
    }
    for (int d = 0; d < 4; ++d) {
      if (w.size(d) != other.w.size(d) || w.stride(d) != other.w.stride(d)) return false;
    }
    return !mask.has_value() || mask->data_ptr() == other.mask->data_ptr();
  }
};

// Attention of a head of some tokens to others.
MssaHead meet(const TokenRange& queries, const TokenRange& keys, bool itself, int64_t b, int64_t h) {
  const int64_t row = (b * queries.w.size(1) + h) * queries.tokens();
  const auto floats = [row](const Tensor* t) {
    return t == nullptr ? nullptr : static_cast<float*>(t->data_ptr()) + row;
  };
  MssaHead head = {};
  head.seqlen = queries.tokens();
  head.nkeys = keys.tokens();
  head.itself = itself;
  head.query_start = queries.start;
  head.key_start = keys.start;
  head.w = view(queries.w, false, b, h, 0);
  head.keys = view(keys.w, false, b, h, 0);
  if (queries.dout != nullptr) head.dout = view(*queries.dout, false, b, h, 0);
  if (keys.mask.has_value()) head.key_mask = static_cast<const uint8_t*>(keys.mask->data_ptr()) + b * keys.tokens();
  head.lse = floats(queries.lse);
  head.delta = floats(queries.delta);
  head.dlse = floats(queries.dlse);
  return head;
}

struct Heads {
  std::vector<MssaHead> rows, columns;  // the rows as queries, and as keys
};

Heads list_heads(const TokenRange& rows, const TokenRange& columns, const MssaRectangularCall& call) {
  const int64_t batch = rows.w.size(0), nheads = rows.w.size(1);
  const bool itself = rows == columns;
  Heads heads;
  if (rows.tokens() == 0 || columns.tokens() == 0) return heads;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < nheads; ++h) {
      heads.rows.push_back(meet(rows, columns, itself, b, h));
      heads.columns.push_back(meet(columns, rows, itself, b, h));
      heads.rows.back().counter = heads.columns.back().counter = call.counter(b, h, nheads);
    }
  }
  return heads;
}

int64_t parts_of(int64_t heads, int64_t tokens) {
  return std::min(threads_per_head(heads), std::max<int64_t>(1, (tokens + kBlock - 1) / kBlock));
}

MssaProblem rectangular_problem(const Tensor& rows, const MssaRectangularCall& call) {
  MssaProblem p = problem(rows, call.attention());
  p.result = Dtype::f32;
  p.range = true;
  return p;
}

void forward(Tensor rows, Tensor columns, MssaRectangularCall call, Tensor out, Tensor lse) {
  mssa::check_rectangular_forward(rows, columns, call, out, lse);
  const MssaProblem p = rectangular_problem(rows, call);
  const TokenRange own = {rows, nullptr, &lse, nullptr, nullptr, call.row_mask, call.row_start};
  const TokenRange others = {columns, nullptr, nullptr, nullptr, nullptr, call.column_mask, call.column_start};
  std::vector<MssaHead> heads = list_heads(own, others, call).rows;
  const MssaKernels& k = kernels(p);
  const int64_t count = static_cast<int64_t>(heads.size()), parts = parts_of(count, own.tokens());
  for (int64_t i = 0; i < count; ++i) heads[i].out = view(out, false, i / out.size(1), i % out.size(1), 0);
  for_each_task(count * parts, [&](int64_t i, Arena& arena) {
    k.forward(p, heads[i / parts], static_cast<int>(i % parts), static_cast<int>(parts), arena);
  });
}

void find_delta(Tensor dout, Tensor out, Tensor delta) {
  mssa::check_delta(dout, out, delta);
  const MssaProblem p = problem(dout, MssaCall{});
  const int64_t nheads = dout.size(1), tokens = dout.size(2);
  const MssaKernels& k = kernels(p);
  auto* const numbers = static_cast<float*>(delta.data_ptr());
  for_each_task(dout.size(0) * nheads, [&](int64_t i, Arena& arena) {
    MssaHead head = {};
    head.seqlen = tokens;
    head.dout = view(dout, false, i / nheads, i % nheads, 0);
    head.out = view(out, false, i / nheads, i % nheads, 0);
    k.rectangular_delta(p, head, arena, numbers + i * tokens);
  });
}

void backward(Tensor rows, Tensor dout, Tensor lse, Tensor delta, Tensor dlse, Tensor columns, Tensor column_dout,
              Tensor column_lse, Tensor column_delta, Tensor column_dlse, MssaRectangularCall call, Tensor dw) {
  mssa::check_rectangular_backward({rows, dout, lse, delta, dlse},
                                   {columns, column_dout, column_lse, column_delta, column_dlse}, call, dw);
  const MssaProblem p = rectangular_problem(rows, call);
  const TokenRange own = {rows, &dout, &lse, &delta, &dlse, call.row_mask, call.row_start};
  const TokenRange others = {columns,      &column_dout,     &column_lse,      &column_delta,
                             &column_dlse, call.column_mask, call.column_start};
  Heads heads = list_heads(own, others, call);
  const MssaKernels& k = kernels(p);
  const int64_t count = static_cast<int64_t>(heads.rows.size());
  const int64_t parts = parts_of(count, std::min(own.tokens(), others.tokens()));
  const int64_t size = parts * mssa_partial_size(own.tokens(), p.head_dim);
  for (int64_t i = 0; i < count; ++i) heads.columns[i].dw = view(dw, false, i / dw.size(1), i % dw.size(1), 0);
  const auto add_part = [&](int64_t i, int64_t part, Arena& arena, float* shares) {
    k.rectangular_backward(p, heads.rows[i], heads.columns[i], static_cast<int>(part), static_cast<int>(parts), arena,
                           shares);
  };
  const auto combine = [&](int64_t i, const float* shares) {
    k.combine(p, heads.columns[i], static_cast<int>(parts), shares, 0, own.tokens());
  };
  if (parts == 1) {
    for_each_task(count, [&](int64_t i, Arena& arena) {
      const auto shares = allocate_parts(size);
      add_part(i, 0, arena, shares.get());
      combine(i, shares.get());
    });
    return;
  }
  // Every part has its own accumulator. Rows are summed in the order of the parts: every run gives the same bits.
  const auto shares = allocate_parts(count * size);
  for_each_task(count * parts, [&](int64_t i, Arena& arena) {
    add_part(i / parts, i % parts, arena, shares.get() + i / parts * size);
  });
  for_each_task(count, [&](int64_t i, Arena&) { combine(i, shares.get() + i * size); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("mssa_rectangular_fwd(" CRATE_MSSA_RECTANGULAR_FWD ") -> ()");
  m.def("mssa_rectangular_delta(" CRATE_MSSA_RECTANGULAR_DELTA ") -> ()");
  m.def("mssa_rectangular_bwd(" CRATE_MSSA_RECTANGULAR_BWD ") -> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("mssa_rectangular_fwd", &forward));
  m.impl(CRATE_KERNEL("mssa_rectangular_delta", &find_delta));
  m.impl(CRATE_KERNEL("mssa_rectangular_bwd", &backward));
}

}  // namespace crate_kernels
