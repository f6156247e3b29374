// The table of one level's kernels, for tssa_cpu.cpp.
#pragma once

#include "causal_backward.h"
#include "full_backward.h"

namespace {
namespace tssa {

template <int kAlone, int kShared>
constexpr TssaKernel tssa_kernel(const TssaKernelStep (&alone)[kAlone], const TssaKernelStep (&shared)[kShared],
                                 int shared_cost, int64_t (*work_size)(const TssaCpuProblem&, int64_t)) {
  return {alone, kAlone, shared, kShared, shared_cost, work_size};
}

constexpr crate_kernels::TssaKernels kKernels = {
    tssa_kernel(kFullForward, kFullForward, 1, FullWork::size),
    tssa_kernel(kFullBackward, kFullBackward, 1, FullWork::size),
    tssa_kernel(kCausalForwardAlone, kCausalForwardShared, 1, causal_work_size),
    tssa_kernel(kCausalBackwardAlone, kCausalBackwardShared, 2, causal_backward_work_size),
    Staging::size,
};

}  // namespace tssa
}  // namespace
