// Launches of subspace attention by fp32 products.
#include "host.cuh"
#include "plain_backward.cuh"
#include "plain_forward.cuh"

namespace crate_kernels::plain {
namespace {

// Chunks of the output that a block accumulates at once.
constexpr int kMostChunks = 2;

Launch launch_rows(Problem& c, int32_t device, int64_t shared_bytes) {
  constexpr int kWidth = kMostChunks * kChunk;
  Launch l = launch_of(c, c.seqlen > 0 ? (c.seqlen + kOwned - 1) / kOwned : 1, kThreads, shared_bytes, device);
  c.groups = (c.access.head_dim + kWidth - 1) / kWidth;
  l.grid *= c.groups;
  return l;
}

bool one_chunk(const Problem& c) {
  return c.access.head_dim <= kChunk;
}

// Whether the rows meet another range of their sequence, whose delta is known.
bool apart(const Problem& c) {
  return c.others.nheads > 0;
}

}  // namespace

void find_delta(Problem c, int32_t device) {
  Launch l = launch_rows(c, device, kDeltaShared);
  l.grid /= c.groups;
  launch<mssa_plain_delta_kernel>(l, c);
}

// With levels, the forward writes what the backward needs of it, and nothing else.
void forward(Problem c, int32_t device) {
  const Launch l = launch_rows(c, device, kForwardShared);
  if (apart(c)) {
    if (one_chunk(c)) return launch<mssa_plain_fwd_kernel<1, true>>(l, c);
    return launch<mssa_plain_fwd_kernel<kMostChunks, true>>(l, c);
  }
  if (one_chunk(c)) return launch<mssa_plain_fwd_kernel<1>>(l, c);
  launch<mssa_plain_fwd_kernel<kMostChunks>>(l, c);
}

void backward(Problem c, int32_t device) {
  if (c.levels != nullptr) {
    forward(c, device);
  } else if (!apart(c)) {
    if (c.products && c.seed == nullptr) find_delta(c, device);
    Launch l = launch_rows(c, device, kMeasureShared);
    l.grid /= c.groups;
    launch<mssa_plain_measure_kernel>(l, c);
  }
  const Launch l = launch_rows(c, device, kBackwardShared);
  if (apart(c)) {
    if (one_chunk(c)) return launch<mssa_plain_bwd_kernel<1, true>>(l, c);
    return launch<mssa_plain_bwd_kernel<kMostChunks, true>>(l, c);
  }
  if (one_chunk(c)) return launch<mssa_plain_bwd_kernel<1>>(l, c);
  launch<mssa_plain_bwd_kernel<kMostChunks>>(l, c);
}

}  // namespace crate_kernels::plain
