// The table of one level's kernels, for tssa_cpu.cpp.
#pragma once

#include "causal_backward.h"
#include "full_backward.h"

namespace {
namespace tssa {

template <int kAlone, int kShared>
constexpr TssaKernel tssa_kernel(const TssaStep (&alone)[kAlone], const TssaStep (&shared)[kShared],
                                 int64_t (*work_size)(const TssaProblem&, int64_t)) {
  return {alone, kAlone, shared, kShared, work_size};
}

constexpr crate_kernels::TssaKernels kKernels = {
    tssa_kernel(kFullForward, kFullForward, FullWork::size),
    tssa_kernel(kFullBackward, kFullBackward, FullWork::size),
    tssa_kernel(kCausalForwardAlone, kCausalForwardShared, causal_work_size),
    tssa_kernel(kCausalBackwardAlone, kCausalBackwardShared, causal_backward_work_size),
    Staging::size,
};

}  // namespace tssa
}  // namespace
