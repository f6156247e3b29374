// Writes out and lse.
#pragma once

#include "head.h"

namespace {

// Up to kTile rows of out before the division, and their sums: of rounded and of exact weights, 0 for a row without
// keys. Shifts are in bits.
struct Results {
  const int32_t* token;
  int count;
  const float *out, *total, *exact;
  const double* shift;
};

CRATE_INLINE void write_results(const MssaProblem& p, const MssaHead& head, int64_t width, const Results& results) {
  double logs[kTile];
  for (int n = 0; n < results.count; ++n) logs[n] = log2_of(results.exact[n]);
  for (int n = 0; n < results.count; ++n) {
    const float total = results.total[n], exact = results.exact[n];
    const float inverse = total > 0.0f ? 1.0f / total : total;  // NaN stays
    write_row(element(head.out, results.token[n], p.result), p.result, head.out.dim_stride, p.head_dim,
              results.out + n * width, inverse);
    const bool normal = exact >= 0x1p-126f && exact < INFINITY;
    // In double: the backward takes 1 / l from lse, and an error of lse is a relative error of 1 / l.
    const double log = normal ? logs[n] : log2(static_cast<double>(exact));
    // The total of a row with an infinite score is no number.
    const double lse = results.shift[n] == INFINITY ? INFINITY : (log + results.shift[n]) * kLn2;
    head.lse[results.token[n]] = total == 0.0f ? -INFINITY : static_cast<float>(lse);
  }
}

}  // namespace
