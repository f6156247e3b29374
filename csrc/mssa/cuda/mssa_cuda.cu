// The CUDA ops of subspace attention: the choice of kernels for a call, and the calls of those on tensor cores.
#include "../given.h"
#include "host.cuh"
#include "mma_backward_kernel.cuh"
#include "mma_forward.cuh"
#include "mma_host.cuh"
#include "mma_pairs.cuh"
#include "mma_shift.cuh"
#include "rectangular.cuh"

namespace crate_kernels {
namespace {

using namespace mssa;

constexpr int kPairsDim = 64;

// The pair form has one block per head: use it only if every multiprocessor gets one.
bool takes_pairs(const Problem& call, int32_t device) {
  const bool simple = call.scale > 0.0f && !call.select && hides_none(call.mask) && call.keep == nullptr &&
                      call.cu_seqlens == nullptr && call.seed == nullptr;
  const int64_t heads = static_cast<int64_t>(call.sequences) * call.nheads;
  return simple && call.seqlen <= 16 * kMostTiles && call.access.head_dim <= kPairsDim &&
         heads >= multiprocessors(device);
}

template <class T>
void launch_pairs(Problem& call, int32_t device) {
  const int tiles = (call.seqlen + 15) / 16;
  const Launch l = launch_of(call, 1, tiles * 32, pairs_shared_bytes<T, kPairsDim>(tiles), device);
  launch<mma_pairs_kernel<T, kPairsDim>>(l, call);
}

void launch_forward(Problem& call, int32_t device) {
  with_class(call.dtype, call.access.head_dim, [&](auto dim, auto zero) {
    using T = decltype(zero);
    constexpr int kDim = dim;
    if constexpr (kDim <= kPairsDim) {
      if (takes_pairs(call, device)) return launch_pairs<T>(call, device);
    }
    constexpr Tiles t = kForward<kDim>;
    const Launch l = launch_rows(call, device, 16 * t.rows, kDim * sizeof(T), 2 * t.columns * kDim * sizeof(T));
    launch<mma_forward_kernel<T, kDim, t.rows, t.columns, t.held>>(l, call);
  });
}

template <class T, int DIM>
void launch_shift(Problem call, int32_t device) {
  constexpr int kRows = kShiftWarps * 16;
  const int blocks = std::max((call.seqlen + kRows - 1) / kRows, 1);
  const Launch l = launch_of(call, blocks, kShiftWarps * 32, shift_bytes<DIM>(), device);
  launch<mma_shift_kernel<T, DIM>>(l, call);
}

// With levels, the forward writes what the backward needs of it, and nothing else.
void launch_backward(Problem& call, int32_t device) {
  if (call.levels != nullptr) {
    Problem forward = call;
    launch_forward(forward, device);
  }
  with_class(call.dtype, call.access.head_dim, [&](auto dim, auto zero) {
    using T = decltype(zero);
    constexpr int kDim = dim;
    constexpr Tiles t = kBackward<kDim>;
    const Launch l = launch_rows(call, device, 16 * t.rows, 2 * kDim * sizeof(T), 2 * others_bytes<kDim>(t.columns));
    launch_shift<T, kDim>(call, device);
    launch<mma_backward_kernel<T, kDim, t.rows, t.columns, t.held>>(l, call);
  });
}

bool tensor_cores_take(const Problem& call, int32_t device) {
  return call.dtype != Dtype::f32 && compute_capability(device) >= 80 && shared_limit(device) >= 99 * 1024;
}

// The backward rounds scale * P_ij (g_i.w_j - ...) to the tokens' dtype. By a scale far below head_dim^-1/2 it would be
// subnormal in fp16, and multiplied by tokens that are large.
bool rounds_gradients(const Problem& call) {
  return call.dtype == Dtype::f16 && call.scores && std::fabs(call.scale) < 0x1p-8f;
}

// `delta` is scratch, as problem_of says.
void check_delta_scratch(const Tensor& w, const MssaCall& call, const Tensor& delta) {
  const Given given("mssa backward", device_type(), "w", w);
  const Extent e = extent_of(given, "w", w, call.packed());
  const int64_t copies = call.threshold.has_value() ? 3 : 2;
  given.numbers("delta", delta,
                e.packed ? Sizes{copies, e.nheads, e.seqlen} : Sizes{copies, e.batch, e.nheads, e.seqlen});
}

// Scratch of a step, for as many stretches as `part` says.
void check_stretches(const Tensor& w, const Tensor& part, const std::optional<Tensor>& statistics) {
  const Given given("mssa", device_type(), "w", w);
  const Extent e = extent_of(given, "w", w, false);
  given.rank("part", part, 4);
  given.present("statistics", statistics);
  given.numbers("part", part, {e.batch * e.nheads, part.size(1), e.seqlen, e.head_dim});
  given.numbers("statistics", statistics, {e.batch * e.nheads, part.size(1), e.seqlen, 2});
}

// Attends to the tokens themselves, or to a cache.
void attend(Problem problem, int32_t device) {
  if (tensor_cores_take(problem, device)) return launch_forward(problem, device);
  plain::forward(problem, device);
}

void forward(Tensor w, MssaCall call, Tensor out, Tensor lse) {
  check_forward(device_type(), w, call, out, lse);
  if (out.numel() == 0) return;
  const int32_t device = w.get_device_index();
  const OnDevice guard(device);
  attend(problem_of(w, call, nullptr, out, lse), device);
}

void backward(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor w, Tensor out, Tensor lse, MssaCall call,
              Tensor dw, Tensor delta) {
  check_backward(device_type(), dout, dlse, w, out, lse, call, dw);
  check_delta_scratch(w, call, delta);
  if (dw.numel() == 0) return;
  const int32_t device = w.get_device_index();
  const OnDevice guard(device);
  Problem problem = problem_of(dout, dlse, w, out, lse, call, dw, delta);
  if (tensor_cores_take(problem, device) && !rounds_gradients(problem)) return launch_backward(problem, device);
  plain::backward(problem, device);
}

// Without `part` and `statistics`, a forward reads the cache.
void decode(Tensor w, Tensor data, Tensor lengths, MssaDecodeCall call, Tensor out, Tensor lse,
            std::optional<Tensor> part, std::optional<Tensor> statistics) {
  check_decode(device_type(), w, data, lengths, call, out, lse);
  if (out.numel() == 0) return;
  const int32_t device = w.get_device_index();
  const OnDevice guard(device);
  const Cache cache = {data, lengths};
  const Problem problem = problem_of(w, call.attention(), &cache, out, lse);
  if (part.has_value()) {
    check_stretches(w, *part, statistics);
    return decoding::step(problem, *part, *statistics, device);
  }
  decoding::append(problem, device);
  attend(problem, device);
  decoding::advance(problem, device);
}

// Ranges of a sequence take fp32 products in every dtype: the tensor-core kernels have no rows apart from their keys.
void forward_between(Tensor rows, Tensor columns, MssaRectangularCall call, Tensor out, Tensor lse) {
  check_rectangular_forward(device_type(), rows, columns, call, out, lse);
  if (out.numel() == 0) return;
  const int32_t device = rows.get_device_index();
  const OnDevice guard(device);
  plain::forward(problem_of(rows, columns, call, out, lse), device);
}

void delta_between(Tensor dout, Tensor out, Tensor delta) {
  check_delta(device_type(), dout, out, delta);
  if (delta.numel() == 0) return;
  const int32_t device = dout.get_device_index();
  const OnDevice guard(device);
  Problem problem = problem_of(dout, MssaCall{}, nullptr, out, delta);
  problem.g = problem.w;
  problem.delta = problem.lse;
  plain::find_delta(problem, device);
}

void backward_between(Tensor rows, Tensor dout, Tensor lse, Tensor delta, Tensor dlse, Tensor columns,
                      Tensor column_dout, Tensor column_lse, Tensor column_delta, Tensor column_dlse,
                      MssaRectangularCall call, Tensor dw) {
  const Side own = {rows, dout, lse, delta, dlse};
  const Side others = {columns, column_dout, column_lse, column_delta, column_dlse};
  check_rectangular_backward(device_type(), own, others, call, dw);
  if (dw.numel() == 0) return;
  const int32_t device = rows.get_device_index();
  const OnDevice guard(device);
  plain::backward(problem_of(own, others, call, dw), device);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cuda_mssa_fwd(" CRATE_MSSA_FWD ") -> ()");
  m.def("cuda_mssa_bwd(" CRATE_MSSA_BWD ", Tensor(b!) delta) -> ()");
  m.def("cuda_mssa_rectangular_fwd(" CRATE_MSSA_RECTANGULAR_FWD ") -> ()");
  m.def("cuda_mssa_rectangular_delta(" CRATE_MSSA_RECTANGULAR_DELTA ") -> ()");
  m.def("cuda_mssa_rectangular_bwd(" CRATE_MSSA_RECTANGULAR_BWD ") -> ()");
  m.def("cuda_mssa_decode(" CRATE_MSSA_DECODE ", Tensor(e!)? part, Tensor(f!)? statistics) -> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl("cuda_mssa_fwd", CRATE_BOX(&forward));
  m.impl("cuda_mssa_bwd", CRATE_BOX(&backward));
  m.impl("cuda_mssa_rectangular_fwd", CRATE_BOX(&forward_between));
  m.impl("cuda_mssa_rectangular_delta", CRATE_BOX(&delta_between));
  m.impl("cuda_mssa_rectangular_bwd", CRATE_BOX(&backward_between));
  m.impl("cuda_mssa_decode", CRATE_BOX(&decode));
}

}  // namespace crate_kernels
