// The kernels that can compute a call; mssa_cuda.cu chooses. They run on the current device, which must be the tensors'
// device, and on its current stream.
#pragma once

#include "problem.cuh"

namespace crate_kernels {

// fp32 products of the CUDA cores: any dtype, any head_dim up to 256, every argument, every GPU.
namespace plain {
void forward(mssa::Problem problem, int32_t device);
void backward(mssa::Problem problem, int32_t device);
// Writes delta from g and out, summed in the backward's order.
void find_delta(mssa::Problem problem, int32_t device);
}  // namespace plain

// Steps with a cache, whose new tokens are `problem.w`.
namespace decoding {
// Append, attend with one reading of the cache, and advance the lengths. Rows of tokens must be whole packs of 16
// bytes. `part` (heads, splits, new, head_dim) and `statistics` (heads, splits, new, 2) are scratch.
void step(const mssa::Problem& problem, const Tensor& part, const Tensor& statistics, int32_t device);
void append(mssa::Problem problem, int32_t device);
void advance(const mssa::Problem& problem, int32_t device);
}  // namespace decoding

}  // namespace crate_kernels
