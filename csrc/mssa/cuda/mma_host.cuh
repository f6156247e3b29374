// From the tensors of a call to what the tensor-core kernels take, and how they are launched.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "../../common/cuda/launch.cuh"
#include "mma_call.cuh"

namespace crate_kernels::mssa {

// The kernels of a class of head dims: those up to DIM, padded. A warp owns 16 `rows` rows and meets tiles of so many
// columns; its operands stay in registers where they are held. These are the most that spill nothing on sm_80 and
// sm_90, and blocks of four warps fit 99 KB of shared memory, the least that any of these GPUs has; they have not been
// timed. A class more is 8 kernels more to compile.
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

// As many warps as leave no multiprocessor without a block, and none without rows.
inline int warps_of(int64_t heads, int64_t seqlen, int rows, int multiprocessors) {
  int warps = kMostWarps;
  const auto blocks = [&] { return heads * ((seqlen + rows * warps - 1) / (rows * warps)); };
  while (warps > 1 && (blocks() < multiprocessors || rows * warps / 2 >= seqlen)) warps /= 2;
  return warps;
}

inline Strides strides_of(const Tensor& t, bool packed) {
  if (packed) return {0, t.stride(1), t.stride(0), t.stride(2)};
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// Whether every chunk of 16 bytes of a row starts at a multiple of them.
inline bool is_wide(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) % kHalves != 0 || t.stride(last) != 1) return false;
  for (int64_t d = 0; d < last; ++d) {
    if (t.size(d) > 1 && t.stride(d) % kHalves != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

// What both directions have; `to` is what they write.
inline Call call_of(const Tensor& w, const std::optional<Tensor>& key_padding_mask,
                    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& seed, int64_t max_seqlen,
                    bool causal, double scale, double dropout_p, double threshold, const Tensor& lse,
                    const Tensor& to) {
  const bool packed = cu_seqlens.has_value();
  Call call = {};
  call.w = call.keys = w.data_ptr();
  call.to = to.data_ptr();
  call.w_strides = call.key_strides = strides_of(w, packed);
  call.to_strides = strides_of(to, packed);
  call.lse = lse.numel() > 0 ? static_cast<float*>(lse.data_ptr()) : nullptr;
  if (key_padding_mask) call.keep = static_cast<const bool*>(key_padding_mask->data_ptr());
  if (packed) call.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->data_ptr());
  call.sequences = static_cast<int>(packed ? cu_seqlens->size(0) - 1 : w.size(0));
  call.nheads = static_cast<int>(w.size(1));
  call.seqlen = static_cast<int>(packed ? max_seqlen : w.size(2));
  call.total = static_cast<int>(packed ? w.size(0) : w.size(2));
  call.access = {static_cast<int>(w.size(w.dim() - 1)), is_wide(w) && is_wide(to)};
  call.scale = static_cast<float>(scale);
  call.threshold = static_cast<float>(threshold);
  call.select = threshold >= 0;
  call.keep_factor = 1.0f;
  call.causal = causal;
  if (seed) {
    call.seed = static_cast<const int64_t*>(seed->data_ptr());
    call.keep_factor = static_cast<float>(1.0 / (1.0 - dropout_p));
    // Of p > 0 at least one word is dropped, of p = 0 none: the API draws no seed for that.
    call.drop_last = static_cast<uint32_t>(static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0)) - 1);
  }
  return call;
}

// A launch of as many blocks a head as its longest sequence fills; there is one at least, for rows of no sequence.
inline Launch launch_of(Call& call, int32_t device, int rows, int64_t shared_of_row, int64_t shared_of_tiles) {
  const int64_t heads = static_cast<int64_t>(call.sequences) * call.nheads;
  const int warps = warps_of(heads, call.seqlen, rows, multiprocessors(device));
  call.blocks = std::max((call.seqlen + rows * warps - 1) / (rows * warps), 1);
  Launch launch = {};
  launch.grid = heads * call.blocks;
  launch.threads = warps * 32;
  launch.shared_bytes = rows * warps * shared_of_row + shared_of_tiles;
  launch.stream = current_stream(device);
  return launch;
}

}  // namespace crate_kernels::mssa
