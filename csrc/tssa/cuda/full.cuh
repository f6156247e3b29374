// The full form, forward: a sequence on chip, or in chunks.
//
// A pass is one tensor of w's size, nsequences * nheads * seqlen * head_dim * itemsize bytes; a row is the membership,
// nsequences * nheads * seqlen * 4 bytes. From memory, as (read, written):
//
//   form     passes  rows  launches
//   on chip  1, 1    0, 1  1
//   chunks   3, 1    1, 1  5
//
// On chip, the tokens of a sequence are in the shared memory of one block, or spread over the blocks of a cluster,
// which exchange their sums over tokens: reading the tokens again costs no traffic. In chunks, a launch does one step,
// and scan_chunks adds up the sums of the blocks: nheads * (head_dim + 1) floats per block and step, written and read
// once. Both write energies and moments, one fp32 per channel and sequence. The order of every sum is fixed.
#pragma once

#include "../../common/cuda/cluster.cuh"
#include "full_steps.cuh"
#include "shared.cuh"

namespace crate_kernels {

// The tokens of one block of a cluster; blocks have equal shares.
CRATE_DEVICE TssaSpan resident_span(const TssaProblem& p) {
  const int size = cluster_size();
  TssaSpan s = sequence_of(p, static_cast<int>(blockIdx.x) / size);
  cut(s, cluster_rank(), (s.count + size - 1) / size);
  return s;
}

// Copies a block's tokens to shared memory, without gaps.
template <class Access>
CRATE_DEVICE TssaTokens copy_tokens(const TssaProblem& p, const Access& access, const TssaTokens& from, int rows,
                                    char* to) {
  const TssaTokens view = {to, 0, p.head_dim, p.width, 1};
  each_column<Access::kCount>(p, [&](int h, int d, int group, int groups) {
    constexpr int kAhead = 4;  // loads in flight per thread
    for (int n = group; n < rows; n += kAhead * groups) {
      typename Access::Bits bits[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (n + i * groups < rows) bits[i] = *access.place(from, n + i * groups, h, d);
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (n + i * groups < rows) *access.place(view, n + i * groups, h, d) = bits[i];
    }
  });
  return view;
}

template <class Access>
__global__ void __launch_bounds__(512, 1) tssa_full_fwd_resident_kernel(TssaForward f, Access access) {
  const TssaProblem& p = f.problem;
  const TssaSpan s = resident_span(p);
  const TssaResident layout(p, (p.seqlen + cluster_size() - 1) / cluster_size(), blockDim.x, false);
  float *const first = shared_at<float>(layout.first), *const second = shared_at<float>(layout.second),
               *const by_channel = shared_at<float>(layout.channels);
  const TssaReciprocals reciprocals = {by_channel, by_channel + p.width};
  unsigned char* const scratch = shared_memory() + layout.scratch;
  const TssaRows members = {shared_at<float>(layout.by_head[0]), 0, 1, p.nheads, 0};
  const TssaMask key_mask = key_mask_of(p, s);
  const int64_t channels = static_cast<int64_t>(s.index) * p.width;

  char* const to = shared_at<char>(layout.tokens[0]);
  const TssaTokens w = copy_tokens(p, access, part_of(p, f.w, s), s.rows(), to);
  // Without a barrier: each thread reads the tokens that it has copied.
  energy_sums(p, access, w, key_mask, s.rows(), reinterpret_cast<float*>(scratch), first);
  cluster_sync();
  for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
    const float energy = floored(cluster_total(first + column), kFullFloor);
    reciprocals.set(access, column, energy);
    if (s.chunk == 0) f.energy[channels + column] = energy;
  }
  const bool seen = p.mask.data == nullptr || cluster_total(first + p.width) > 0.0f;
  __syncthreads();
  membership(p, access, w, reciprocals, seen, s.rows(), reinterpret_cast<double*>(scratch), members,
             rows_of(p, f.membership, s));
  __syncthreads();
  moment_sums(p, access, w, members, key_mask, s.rows(), reinterpret_cast<float*>(scratch), second);
  cluster_sync();
  for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
    const int h = column / p.head_dim;
    const float moment = cluster_total(second + column) / (cluster_total(second + p.width + h) + kMassFloor);
    by_channel[column] = channel_gate(p, moment, s.index, h, column - h * p.head_dim);
    if (s.chunk == 0) f.moment[channels + column] = moment;
  }
  __syncthreads();
  write_out(p, access, w, members, part_of(p, f.out, s), s.rows(), [&](int h, int d, auto& gate) {
    for (int i = 0; i < Access::kCount; ++i) gate[i] = by_channel[h * p.head_dim + d + i];
  });
  if (s.chunk == 0) clear_uncovered(p, access, f.out, f.membership, s);
  cluster_sync();
}

enum class TssaStep { energy, members, output };

// One step on chunk blockIdx.x % nchunks of a sequence.
template <class Access, TssaStep step>
__global__ void __launch_bounds__(256, 1) tssa_full_fwd_chunk_kernel(TssaForward f, Access access) {
  const TssaProblem& p = f.problem;
  const TssaSpan s = chunk_of(p);
  const TssaTokens w = part_of(p, f.w, s);
  const TssaMask key_mask = key_mask_of(p, s);
  const TssaRows members = rows_of(p, f.membership, s);
  const int64_t size = p.width + p.nheads, place = static_cast<int64_t>(s.index) * (p.nchunks + 1);
  const int64_t mine = (place + s.chunk) * size, all = (place + p.nchunks) * size;
  const int64_t channels = static_cast<int64_t>(s.index) * p.width;
  unsigned char* const scratch = shared_memory();

  if constexpr (step == TssaStep::energy) {
    energy_sums(p, access, w, key_mask, s.rows(), reinterpret_cast<float*>(scratch), f.sums_1 + mine);
    // The first head's slot has the number of keys. The scan adds the other slots too, so they must be finite.
    for (int h = 1 + threadIdx.x; h < p.nheads; h += blockDim.x) f.sums_1[mine + p.width + h] = 0.0f;
  } else if constexpr (step == TssaStep::members) {
    float* const by_channel = reinterpret_cast<float*>(scratch + tssa_scratch(p, blockDim.x));
    const TssaReciprocals reciprocals = {by_channel, by_channel + p.width};
    for (int column = threadIdx.x; column < p.width; column += blockDim.x) {
      const float energy = floored(f.sums_1[all + column], kFullFloor);
      reciprocals.set(access, column, energy);
      if (s.chunk == 0) f.energy[channels + column] = energy;
    }
    __syncthreads();
    const bool seen = p.mask.data == nullptr || f.sums_1[all + p.width] > 0.0f;
    membership(p, access, w, reciprocals, seen, s.rows(), reinterpret_cast<double*>(scratch), members, members);
    __syncthreads();
    moment_sums(p, access, w, members, key_mask, s.rows(), reinterpret_cast<float*>(scratch), f.sums_2 + mine);
  } else {
    const auto moment_of = [&](int h, int d) {
      return f.sums_2[all + h * p.head_dim + d] / (f.sums_2[all + p.width + h] + kMassFloor);
    };
    if (s.chunk == 0) {
      for (int column = threadIdx.x; column < p.width; column += blockDim.x)
        f.moment[channels + column] = moment_of(column / p.head_dim, column % p.head_dim);
      clear_uncovered(p, access, f.out, f.membership, s);
    }
    write_out(p, access, w, members, part_of(p, f.out, s), s.rows(),
              [&](int h, int d, auto& gate) { channel_gates(p, s.index, h, d, moment_of, gate); });
  }
}

}  // namespace crate_kernels
