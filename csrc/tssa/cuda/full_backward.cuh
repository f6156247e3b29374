// The full form, backward: a sequence on chip, or in chunks, as in full.cuh. As (read, written), in its passes and
// rows; a gradient of the membership is one row more:
//
//   form     passes  rows  launches
//   on chip  2, 1    1, 0  1
//   chunks   5, 1    5, 2  5
//
// On chip, shared memory holds w and dout, so half as many tokens fit as in the forward.
#pragma once

#include "full.cuh"
#include "full_backward_steps.cuh"

namespace crate_kernels {

// dM from the sums of g w Pi and of Pi.
CRATE_DEVICE float moment_gradient(float product, float mass, float gate, float moment) {
  return product * gate / (1.0f + moment) / (mass + kMassFloor);
}

template <class Access>
__global__ void __launch_bounds__(512, 1) tssa_full_bwd_resident_kernel(TssaBackward b, Access access) {
  const TssaProblem& p = b.problem;
  const TssaSpan s = resident_span(p);
  const TssaResident layout(p, (p.seqlen + cluster_size() - 1) / cluster_size(), blockDim.x, true);
  float *const first = shared_at<float>(layout.first), *const second = shared_at<float>(layout.second),
               *const gate = shared_at<float>(layout.channels), *const dmoment = gate + p.width,
               *const dmass = shared_at<float>(layout.heads), *const scratch = shared_at<float>(layout.scratch);
  const TssaRows members = {shared_at<float>(layout.by_head[0]), 0, 1, p.nheads, 0};
  const TssaRows dlogit = {shared_at<float>(layout.by_head[1]), 0, 1, p.nheads, 0};
  const TssaMask key_mask = key_mask_of(p, s);
  const int64_t channels = static_cast<int64_t>(s.index) * p.width;
  const float *const energies = b.energy + channels, *const moments = b.moment + channels;
  const auto moment_of = [&](int h, int d) { return moments[h * p.head_dim + d]; };

  char *const to_w = shared_at<char>(layout.tokens[0]), *const to_g = shared_at<char>(layout.tokens[1]);
  const TssaTokens w = copy_tokens(p, access, part_of(p, b.w, s), s.rows(), to_w);
  const TssaTokens dout = copy_tokens(p, access, part_of(p, b.dout, s), s.rows(), to_g);
  const TssaRows stored = rows_of(p, b.membership, s);
  for (int h = threadIdx.x / kWarp; h < p.nheads; h += blockDim.x / kWarp)
    for (int n = threadIdx.x % kWarp; n < s.rows(); n += kWarp) members(n, h) = stored(n, h);
  for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
    const int h = column / p.head_dim;
    gate[column] = channel_gate(p, moments[column], s.index, h, column - h * p.head_dim);
  }
  __syncthreads();
  through_gate(p, access, w, dout, gate, s.rows(), dlogit);
  product_sums(p, access, w, dout, members, key_mask, s.rows(), scratch, first);
  cluster_sync();
  for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
    const float mass = cluster_total(first + p.width + column / p.head_dim);
    dmoment[column] = moment_gradient(cluster_total(first + column), mass, gate[column], moments[column]);
  }
  __syncthreads();
  mass_gradient(p, dmoment, dmass, moment_of);
  __syncthreads();
  logit_gradient(p, access, w, dmoment, dmass, members, optional_rows_of(p, b.dmembership, s), key_mask, s.rows(),
                 scratch, dlogit);
  __syncthreads();
  similarity_gradient_sums(p, access, w, dlogit, energies, s.rows(), scratch, second);
  cluster_sync();
  // Every block has read `first`: it can take the totals.
  for (int column = threadIdx.x; column < p.width; column += blockDim.x) first[column] = cluster_total(second + column);
  __syncthreads();
  if (s.chunk == 0) temp_gradient(p, first, b.dtemp + static_cast<int64_t>(s.index) * p.nheads);
  write_dw(p, access, w, dout, members, dlogit, key_mask, part_of(p, b.dw, s), s.rows(), [&](int h, int d, auto& of) {
    for (int i = 0; i < Access::kCount; ++i) {
      const int column = h * p.head_dim + d + i;
      of[i] = slopes_of(p, gate[column], dmoment[column], first[column], energies[column], h, s.count);
    }
  });
  if (s.chunk == 0) clear_uncovered(p, access, b.dw, nullptr, s);
  cluster_sync();
}

enum class TssaBackwardStep { dgate, dlogit, dw };

// One step on chunk blockIdx.x % nchunks of a sequence.
template <class Access, TssaBackwardStep step>
__global__ void __launch_bounds__(256, 1) tssa_full_bwd_chunk_kernel(TssaBackward b, Access access) {
  const TssaProblem& p = b.problem;
  const TssaSpan s = chunk_of(p);
  const TssaTokens w = part_of(p, b.w, s), dout = part_of(p, b.dout, s);
  const TssaMask key_mask = key_mask_of(p, s);
  const TssaRows members = rows_of(p, b.membership, s), dlogit = rows_of(p, b.dlogit, s);
  const int64_t size = p.width + p.nheads, place = static_cast<int64_t>(s.index) * (p.nchunks + 1);
  const int64_t mine = (place + s.chunk) * size, all = (place + p.nchunks) * size;
  const int64_t channels = static_cast<int64_t>(s.index) * p.width;
  const float *const energies = b.energy + channels, *const moments = b.moment + channels;
  float* const scratch = reinterpret_cast<float*>(shared_memory());
  float* const by_channel = scratch + tssa_scratch(p, blockDim.x) / sizeof(float);
  float* const by_head = by_channel + p.width;
  const auto moment_of = [&](int h, int d) { return moments[h * p.head_dim + d]; };
  const auto gate_of = [&](int h, int d) { return channel_gate(p, moment_of(h, d), s.index, h, d); };
  const auto dmoment_of = [&](int h, int d, float gate) {
    return moment_gradient(b.sums_1[all + h * p.head_dim + d], b.sums_1[all + p.width + h], gate, moment_of(h, d));
  };

  if constexpr (step == TssaBackwardStep::dgate) {
    for (int column = threadIdx.x; column < p.width; column += blockDim.x)
      by_channel[column] = gate_of(column / p.head_dim, column % p.head_dim);
    __syncthreads();
    through_gate(p, access, w, dout, by_channel, s.rows(), dlogit);
    product_sums(p, access, w, dout, members, key_mask, s.rows(), scratch, b.sums_1 + mine);
  } else if constexpr (step == TssaBackwardStep::dlogit) {
    for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
      const int h = column / p.head_dim, d = column - h * p.head_dim;
      by_channel[column] = dmoment_of(h, d, gate_of(h, d));
    }
    __syncthreads();
    mass_gradient(p, by_channel, by_head, moment_of);
    __syncthreads();
    logit_gradient(p, access, w, by_channel, by_head, members, optional_rows_of(p, b.dmembership, s), key_mask,
                   s.rows(), scratch, dlogit);
    __syncthreads();
    similarity_gradient_sums(p, access, w, dlogit, energies, s.rows(), scratch, b.sums_2 + mine);
    for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) b.sums_2[mine + p.width + h] = 0.0f;
  } else {
    if (s.chunk == 0) {
      temp_gradient(p, b.sums_2 + all, b.dtemp + static_cast<int64_t>(s.index) * p.nheads);
      clear_uncovered(p, access, b.dw, nullptr, s);
    }
    write_dw(p, access, w, dout, members, dlogit, key_mask, part_of(p, b.dw, s), s.rows(), [&](int h, int d, auto& of) {
      float gate[Access::kCount];  // channels of the thread's vector
      channel_gates(p, s.index, h, d, moment_of, gate);
      for (int i = 0; i < Access::kCount; ++i) {
        const int column = h * p.head_dim + d + i;
        const float dmoment = dmoment_of(h, d + i, gate[i]);
        of[i] = slopes_of(p, gate[i], dmoment, b.sums_2[all + column], energies[column], h, s.count);
      }
    });
  }
}

}  // namespace crate_kernels
