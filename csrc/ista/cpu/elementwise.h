// One pass for everything between two products.
#pragma once

#include "../../common/cpu/convert.h"
#include "kernels.h"

namespace {
namespace ista {

using crate_kernels::IstaCpuUpdate;
using crate_kernels::Operand;

constexpr int kSegment = 256;  // elements converted at a time; they fit the first-level cache

CRATE_INLINE char* element(const Operand& operand, int64_t at) {
  return static_cast<char*>(operand.data) + at * crate_kernels::itemsize(operand.dtype);
}

// fp32 is used in place; other dtypes pass through `scratch`.
CRATE_INLINE const float* read(const Operand& operand, int64_t at, int n, float* scratch) {
  if (operand.dtype == Dtype::f32) return reinterpret_cast<const float*>(element(operand, at));
  read_row(element(operand, at), operand.dtype, 1, n, scratch);
  return scratch;
}
CRATE_INLINE float* target(const Operand& operand, int64_t at, float* scratch) {
  return operand.dtype == Dtype::f32 ? reinterpret_cast<float*>(element(operand, at)) : scratch;
}
CRATE_INLINE void finish(const Operand& operand, int64_t at, int n, const float* scratch) {
  if (operand.dtype != Dtype::f32) write_row(element(operand, at), operand.dtype, 1, n, scratch);
}

// ivdep: if the output is an input, they overlap element for element. The compiler's own overlap test would send every
// in-place call to a scalar loop.

void update(const IstaCpuUpdate& u, int64_t begin, int64_t end) {
  alignas(64) float scratch[4][kSegment];
  const float scale = u.scale, threshold = u.threshold;
  for (int64_t at = begin; at < end; at += kSegment) {
    const int n = static_cast<int>(end - at < kSegment ? end - at : kSegment);
    const float* const product = read(u.product, at, n, scratch[0]);
    float* const out = target(u.out, at, scratch[3]);
    if (u.base.data == nullptr) {
#pragma GCC ivdep
      for (int i = 0; i < n; ++i) out[i] = scale * product[i];
    } else {
      const float* const base = read(u.base, at, n, scratch[1]);
#pragma GCC ivdep
      for (int i = 0; i < n; ++i) out[i] = base[i] + scale * product[i];
    }
    // Comparisons keep NaN, as in PyTorch. A two-sided threshold of zero changes nothing.
    if (u.nonnegative) {
      for (int i = 0; i < n; ++i) {
        const float v = out[i] - threshold;
        out[i] = v <= 0.0f ? 0.0f : v;
      }
    } else if (threshold != 0.0f) {
      for (int i = 0; i < n; ++i) {
        const float v = out[i];
        out[i] = v > threshold ? v - threshold : v < -threshold ? v + threshold : v * 0.0f;
      }
    }
    if (u.gate.data != nullptr) {
      const float* const gate = read(u.gate, at, n, scratch[2]);
#pragma GCC ivdep
      for (int i = 0; i < n; ++i) out[i] = gate[i] != 0.0f ? out[i] : 0.0f;
    }
    finish(u.out, at, n, out);
  }
}

}  // namespace ista
}  // namespace
