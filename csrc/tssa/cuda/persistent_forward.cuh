// persistent.cuh, forward: reads w once and writes out and the membership once, in one launch.
#pragma once

#include "persistent_steps.cuh"

namespace crate_kernels {

template <class T, int HEADS, int HEAD_DIM, int CLUSTER, int THREADS, int BUFFERS, bool MASKED, int TOGETHER>
__global__ void __launch_bounds__(THREADS, TOGETHER > 1 ? 1 : 768 / THREADS)
    tssa_full_fwd_persistent_kernel(TssaForward f) {
  using S = TssaSizes<T, HEADS, HEAD_DIM, CLUSTER, THREADS, BUFFERS, MASKED, TOGETHER>;
  using Shared = TssaPersistentShared<S, false>;
  const TssaProblem& p = f.problem;
  const int share = (p.seqlen + S::kBlocks - 1) / S::kBlocks;
  const Shared at(share);
  float* const memory = reinterpret_cast<float*>(shared_memory());
  float *const first = memory + Shared::kFirst, *const second = memory + Shared::kSecond,
               *const channels = memory + Shared::kChannels, *const members = memory + at.members,
               *const key_weights = memory + at.key_weights, *const scratch = memory + at.scratch;
  TssaMeeting<S> meeting(f);
  const TssaVectorOf<S> v;
  const TssaLayout<S> layout(f.w, share);
  const TssaFetch<S> fetch = {f, layout, shared_address(memory), at.size};
  float* const sums = scratch + v.group * S::kSums;  // of the thread's group
  float temp[S::kOfLane];                            // in bits
#pragma unroll
  for (int j = 0; j < S::kOfLane; ++j)
    temp[j] = p.temp[static_cast<int>(threadIdx.x) % S::kLanes * S::kOfLane + j] * 1.4426950408889634f;

  each_sequence<S>(p, fetch, [&](int index, int buffer, uint32_t phase) {
    const TssaSpan s = span_of<S>(p, index);
    const int rows = s.rows();
    const TssaPlace place = place_of<S>(v, layout, fetch.tokens(buffer));
    const int64_t columns = static_cast<int64_t>(index) * S::kWidth;
    put_key_weights<S>(p, s, key_weights);
    if constexpr (MASKED) __syncthreads();
    fetch.wait(buffer, phase);
    {
      float acc[8] = {};  // (8 channels,) per thread
      uint32_t from = place.address;
#pragma unroll 4
      for (int n = v.group; n < rows; n += S::kGroups, from += place.step) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float counted = key_weight<S>(key_weights, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] += MASKED ? x[i] * x[i] * counted : x[i] * x[i];
      }
      put_vector(sums + v.column(), acc);
    }
    __syncthreads();
    add_groups<S, S::kWidth>(scratch, first);
    if (MASKED && threadIdx.x < kWarp) {
      float count = 0.0f;
      for (int n = threadIdx.x; n < rows; n += kWarp) count += key_weights[n];
      count = warp_sum(count);
      if (threadIdx.x == 0) first[S::kWidth] = count;
    }
    meet<S>(first, meeting);
    each_four<S, S::kWidth>([&](int column) {
      const float4 c = by_each(total_4<S>(first + column), [](float e) { return floored(e, kFullFloor); });
      put_four(channels + column, by_each(c, inverse_of));
      if (s.chunk == 0) put_four(f.energy + columns + column, c);
    });
    const bool seen = !MASKED || total_of<S>(first + S::kWidth) > 0.0f;
    __syncthreads();
    {
      float inverse[8];  // (8 channels,) per thread
      get_vector(channels + v.column(), inverse);
      const TssaRows stored = rows_of(p, f.membership, s);
      const auto ratios = [&](int first, int end) {
        float* to = scratch + v.group * S::kRow + v.vector;
        uint32_t from = place.address + first * place.pitch;
#pragma unroll 4
        for (int n = first + v.group; n < end; n += S::kGroups, from += place.step, to += S::kGroups * S::kRow) {
          float x[8], even = 0.0f, odd = 0.0f;  // (8 channels,) of a token
          load_vector<T>(from, x);
#pragma unroll
          for (int i = 0; i < 8; i += 2) {
            even += x[i] * x[i] * inverse[i];
            odd += x[i + 1] * x[i + 1] * inverse[i + 1];
          }
          *to = even + odd;
        }
      };
      each_slice<S>(rows, ratios, [&](int n, int row, int head, bool own) {
        softmax_of_heads<S>(
            scratch + row * S::kRow, temp, [](int, float ratios) { return ratios; }, seen, n, head, own, stored,
            members);
      });
    }
    {
      float acc[8] = {}, mass = 0.0f;  // (8 channels,) per thread; of its head
      uint32_t from = place.address;
#pragma unroll 4
      for (int n = v.group; n < rows; n += S::kGroups, from += place.step) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float weight = members[n * HEADS + v.head] * key_weight<S>(key_weights, n);
        mass += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] += x[i] * x[i] * weight;
      }
      put_vector(sums + v.column(), acc);
      if (v.channel == 0) sums[S::kWidth + v.head] = mass;
    }
    __syncthreads();
    add_groups<S, S::kSums>(scratch, second);
    meet<S>(second, meeting);
    each_four<S, S::kWidth>([&](int column) {
      const int h = column / HEAD_DIM;
      const float inverse = inverse_of(total_of<S>(second + S::kWidth + h) + kMassFloor);
      const float4 moment = by_each(total_4<S>(second + column), [&](float sum) { return sum * inverse; });
      put_four(channels + column, gates_of(p, moment, index, h, column - h * HEAD_DIM));
      if (s.chunk == 0) put_four(f.moment + columns + column, moment);
    });
    __syncthreads();
    {
      float gate[8];  // (8 channels,) per thread
      get_vector(channels + v.column(), gate);
      const TssaTokens out = part_of(p, f.out, s);
      T* to = reinterpret_cast<T*>(out.data) + out.at(v.group, v.head, v.channel);
      const int64_t ahead = S::kGroups * out.token;
      uint32_t from = place.address;
#pragma unroll 4
      for (int n = v.group; n < rows; n += S::kGroups, from += place.step, to += ahead) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float member = -members[n * HEADS + v.head];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= member * gate[i];
        store_vector(to, x);
      }
    }
    if (s.chunk == 0) clear_uncovered(p, TssaHalves{{p.dtype}}, f.out, f.membership, s);
  });
}

}  // namespace crate_kernels
