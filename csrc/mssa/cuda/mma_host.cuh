// Launches the tensor-core kernels.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../common/cuda/launch.cuh"
#include "mma_tile.cuh"

namespace crate_kernels::mssa {

// Tiles of a class of head dims: those up to DIM, padded to DIM. A warp owns 16 * rows rows and walks over tiles of
// `columns` keys; `held`: its operands stay in registers. These are the largest tiles without spills on sm_80 and sm_90
// whose blocks of four warps fit 99 KB of shared memory, the least of these GPUs. They have not been timed. Each
// further class means 8 more kernels to compile.
struct Tiles {
  int rows, columns;
  bool held;
};
template <int DIM>
constexpr Tiles kForward = {2, 64, true};
template <int DIM>
constexpr Tiles kBackward = {2, 64, true};
template <>
constexpr Tiles kForward<128> = {2, 32, false};
template <>
constexpr Tiles kBackward<128> = {1, 32, true};
template <>
constexpr Tiles kForward<256> = {1, 32, false};
template <>
constexpr Tiles kBackward<256> = {1, 16, false};

constexpr int kMostHeadDim = 256, kMostWarps = 4;

// Calls f with the class of a head dim, as a constant, and a zero of the element type.
template <class F>
void with_class(Dtype dtype, int head_dim, F&& f) {
  const auto typed = [&](auto dim) { dtype == Dtype::bf16 ? f(dim, bf16{}) : f(dim, fp16{}); };
  if (head_dim <= 32) return typed(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return typed(std::integral_constant<int, 64>{});
  if (head_dim <= 128) return typed(std::integral_constant<int, 128>{});
  typed(std::integral_constant<int, 256>{});
}

// The most warps per block such that every multiprocessor has a block and every warp has rows.
inline int warps_of(int64_t heads, int64_t seqlen, int rows, int multiprocessors) {
  int warps = kMostWarps;
  const auto blocks = [&] { return heads * ((seqlen + rows * warps - 1) / (rows * warps)); };
  while (warps > 1 && (blocks() < multiprocessors || rows * warps / 2 >= seqlen)) warps /= 2;
  return warps;
}

// A launch with enough blocks per head for the longest sequence. At least one block, which clears uncovered rows.
inline Launch launch_rows(Problem& call, int32_t device, int rows, int64_t shared_of_row, int64_t shared_of_tiles) {
  const int64_t heads = static_cast<int64_t>(call.sequences) * call.nheads;
  const int warps = warps_of(heads, call.seqlen, rows, multiprocessors(device)), block = rows * warps;
  const int blocks = std::max((call.seqlen + block - 1) / block, 1);
  return launch_of(call, blocks, warps * 32, block * shared_of_row + shared_of_tiles, device);
}

}  // namespace crate_kernels::mssa
