// The kernels on tensor cores for what those of sm_90a leave: head_forward.cuh, head_backward.cuh, long_forward.cuh.
// They are launched behind them, and their blocks leave at once where nothing is left.
//
// left: for every head, how many of its last tokens are left. A forward leaves those from the first on that is out of
// its range: causal, the bits of a prefix may not depend on later tokens, and so not on which kernel takes them.
#pragma once

#include "mma_backward_kernel.cuh"
#include "mma_forward.cuh"
#include "mma_shift.cuh"

namespace crate_kernels::mssa {

template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
__global__ void __launch_bounds__(128) mma_left_forward_kernel(Problem call, const int32_t* left) {
  const Head head(call, blockIdx.x / call.blocks);
  const int count = left[blockIdx.x / call.blocks];
  if (count == 0) return clear_uncovered(call, head, blockIdx.x % call.blocks, call.outputs.out, call.outputs.lse);
  forward_block<T, DIM, ROWS16, COLUMNS, IN_REGISTERS>(call, head.length - count);
}

template <class T, int DIM>
__global__ void __launch_bounds__(kShiftWarps * 32, kShiftBlocks)
    mma_left_shift_kernel(Problem call, const int32_t* left) {
  if (left[blockIdx.x / call.blocks] != 0) shift_block<T, DIM>(call);
}

template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
__global__ void __launch_bounds__(128) mma_left_backward_kernel(Problem call, const int32_t* left) {
  const Head head(call, blockIdx.x / call.blocks);
  if (left[blockIdx.x / call.blocks] == 0) {
    return clear_uncovered(call, head, blockIdx.x % call.blocks, call.outputs.dw, nullptr);
  }
  backward_block<T, DIM, ROWS16, COLUMNS, IN_REGISTERS>(call);
}

}  // namespace crate_kernels::mssa
