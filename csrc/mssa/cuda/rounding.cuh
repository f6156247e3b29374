// The rounding of out that a gradient bears: what the backwards without dropout ask of 16-bit rows.
// ../cpu/row_stats.h has the measure of it.
#pragma once

namespace crate_kernels::mssa {

constexpr float kDeviation = 0.2f;  // of a rounding, in eps

// What dw bears, in units of kDeviation eps and of the largest |g| of a warp's rows.
constexpr float kMaxRounding = 2.0f;

}  // namespace crate_kernels::mssa
