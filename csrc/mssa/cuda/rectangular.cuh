// The problems of attention of rows to another range of their sequence: crate_kernels/ops/mssa/rectangular. Results are
// fp32: those of several ranges are put together.
#pragma once

#include "../given.h"
#include "problem.cuh"

namespace crate_kernels::mssa {

inline Problem problem_of(const Tensor& rows, const Tensor& columns, const MssaRectangularCall& call, const Tensor& out,
                          const Tensor& lse) {
  Problem p = problem_of(rows, call.attention(), nullptr, out, lse);
  p.keys = rows_of(columns, false);
  p.results = Dtype::f32;
  p.others.keep = pointer<const uint8_t>(call.column_mask);
  p.others.count = static_cast<int>(columns.size(2));
  p.others.start = static_cast<int>(call.column_start);
  p.others.row_start = static_cast<int>(call.row_start);
  p.others.first_head = static_cast<int>(call.first_head);
  p.others.nheads = static_cast<int>(call.nheads > 0 ? call.nheads : rows.size(1));
  return p;
}

inline Problem problem_of(const Side& rows, const Side& columns, const MssaRectangularCall& call, const Tensor& dw) {
  Problem p = problem_of(rows.w, columns.w, call, dw, rows.lse);
  p.dw = p.out;
  p.g = rows_of(rows.dout, false);
  p.delta = static_cast<float*>(rows.delta.data_ptr());
  p.dlse = static_cast<const float*>(rows.dlse.data_ptr());
  p.keep = pointer<const uint8_t>(call.row_mask);
  p.others.g = rows_of(columns.dout, false);
  p.others.lse = static_cast<const float*>(columns.lse.data_ptr());
  p.others.delta = static_cast<const float*>(columns.delta.data_ptr());
  p.others.dlse = static_cast<const float*>(columns.dlse.data_ptr());
  p.values = p.products = p.scores = true;
  return p;
}

}  // namespace crate_kernels::mssa
