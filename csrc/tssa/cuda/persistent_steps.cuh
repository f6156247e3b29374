// Steps of persistent.cuh: a thread's vectors, sums over tokens, and the softmax over heads.
#pragma once

#include "../../common/cuda/grid.cuh"
#include "persistent.cuh"

namespace crate_kernels {

// A thread's vector of each of its tokens.
struct TssaPlace {
  uint32_t address;
  int pitch, step;  // bytes from a token to the next one, and to the thread's next one
};
template <class S>
CRATE_DEVICE TssaPlace place_of(const TssaVectorOf<S>& v, const TssaLayout<S>& layout, uint32_t tokens) {
  const int at = v.head * layout.head + v.channel + v.group * layout.token;
  return {tokens + 2 * at, 2 * layout.token, 2 * S::kGroups * layout.token};
}
template <class T>
CRATE_DEVICE void load_vector(uint32_t address, float (&x)[8]) {
  const uint4 bits = load_shared_4(address);
  const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack_pair<T>(pairs[i]);
    x[2 * i] = both.x, x[2 * i + 1] = both.y;
  }
}
template <class T>
CRATE_DEVICE void store_vector(T* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]),
                                             pack_pair<T>(x[4], x[5]), pack_pair<T>(x[6], x[7]));
}

CRATE_DEVICE float4 four_at(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
CRATE_DEVICE void put_four(float* to, float4 v) {
  *reinterpret_cast<float4*>(to) = v;
}
template <class F>
CRATE_DEVICE float4 by_each(float4 v, F f) {
  return make_float4(f(v.x), f(v.y), f(v.z), f(v.w));
}
CRATE_DEVICE float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
CRATE_DEVICE void put_vector(float* to, const float (&x)[8]) {
  put_four(to, make_float4(x[0], x[1], x[2], x[3]));
  put_four(to + 4, make_float4(x[4], x[5], x[6], x[7]));
}
CRATE_DEVICE void get_vector(const float* from, float (&x)[8]) {
  const float4 a = four_at(from), b = four_at(from + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Calls f(i) for every multiple of 4 below COUNT, shared by the threads.
template <class S, int COUNT, class F>
CRATE_DEVICE void each_four(F f) {
  constexpr int kTrips = (COUNT / 4 + S::kThreads - 1) / S::kThreads;
#pragma unroll
  for (int i = 0; i < kTrips; ++i) {
    const int at = i * S::kThreads + static_cast<int>(threadIdx.x);
    if (COUNT / 4 % S::kThreads == 0 || at < COUNT / 4) f(4 * at);
  }
}

// `to` = the groups' sums added up, COUNT numbers each.
template <class S, int COUNT>
CRATE_DEVICE void add_groups(const float* groups, float* to) {
  each_four<S, COUNT>([&](int i) {
    float4 sum = four_at(groups + i);
#pragma unroll
    for (int g = 1; g < S::kGroups; ++g) sum = plus(sum, four_at(groups + g * S::kSums + i));
    put_four(to + i, sum);
  });
}

// The cluster's totals, added in the order of the ranks.
template <class S>
CRATE_DEVICE float4 cluster_total_4(const float* own) {
  float4 sum = cluster_read_4(own, 0);
#pragma unroll
  for (int rank = 1; rank < S::kCluster; ++rank) sum = plus(sum, cluster_read_4(own, rank));
  return sum;
}

// What clusters that share a sequence exchange: their totals, of this turn and the next, and how many have come.
template <class S>
struct TssaMeeting {
  float* sums;
  uint32_t* counter;
  uint32_t turn = 0;

  CRATE_DEVICE explicit TssaMeeting(const TssaPass& pass) {
    const int group = static_cast<int>(blockIdx.x) / S::kBlocks;
    sums = pass.sums_1 + group * (2 * S::kTogether * S::kSums);
    counter = reinterpret_cast<uint32_t*>(pass.sums_2) + group;
  }
};

// Waits for the blocks of the sequence, which have put their sums at `own`; then total_4 and total_of have the totals.
template <class S>
CRATE_DEVICE void meet(float* own, TssaMeeting<S>& meeting) {
  cluster_sync();
  if constexpr (S::kTogether > 1) {
    float* const sums = meeting.sums + meeting.turn % 2 * (S::kTogether * S::kSums);
    if (cluster_rank() == 0) {
      float* const to = sums + static_cast<int>(blockIdx.x) / S::kCluster % S::kTogether * S::kSums;
      each_four<S, S::kSums>([&](int i) { put_four(to + i, cluster_total_4<S>(own + i)); });
      __syncthreads();
      if (threadIdx.x == 0) counter_arrive(meeting.counter);
    }
    ++meeting.turn;
    if (threadIdx.x == 0) counter_wait(meeting.counter, meeting.turn * S::kTogether);
    __syncthreads();
    // The cluster's first block has read `own`.
    each_four<S, S::kSums>([&](int i) {
      float4 sum = read_others_4(sums + i);
#pragma unroll
      for (int n = 1; n < S::kTogether; ++n) sum = plus(sum, read_others_4(sums + n * S::kSums + i));
      put_four(own + i, sum);
    });
    __syncthreads();
  }
}

// The sequence's totals, in a fixed order.
template <class S>
CRATE_DEVICE float4 total_4(const float* own) {
  if constexpr (S::kTogether > 1) {
    return four_at(own);
  } else {
    return cluster_total_4<S>(own);
  }
}
template <class S>
CRATE_DEVICE float total_of(const float* own) {
  if constexpr (S::kTogether > 1) return *own;
  float sum = cluster_read(own, 0);
#pragma unroll
  for (int rank = 1; rank < S::kCluster; ++rank) sum += cluster_read(own, rank);
  return sum;
}

template <int COUNT>
CRATE_DEVICE float sum_of(const float* from) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from + i);
    even += pair.x, odd += pair.y;
  }
  return even + odd;
}

// 1 / x for any x > 0: the instruction alone gives 0 where the result is below 2^-126. The shift is exact.
CRATE_DEVICE float inverse_of(float x) {
  constexpr float kLarge = 1.2676506e30f, kShift = 9.094947e-13f;  // 2^100, 2^-40
  const bool large = x > kLarge;
  const float inverse = inverse_fast(large ? x * kShift : x);
  return large ? inverse * kShift : inverse;
}

// Calls put(first, end) and then, behind a barrier, take(token, row, first head of the lane, own) for slices of the
// block's tokens, with another barrier behind it. kLanes lanes take a token, whose numbers are in that row. Several
// lanes take part as whole warps, as they shuffle; those beyond the last token get it again, with `own` false.
template <class S, class Put, class Take>
CRATE_DEVICE void each_slice(int rows, Put put, Take take) {
  const int lane = static_cast<int>(threadIdx.x) % S::kLanes;
#pragma unroll 1
  for (int first = 0; first < rows; first += S::kSlice) {
    const int count = min(rows - first, S::kSlice);
    put(first, first + count);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < (S::kLanes == 1 ? count : (count * S::kLanes + 31) / 32 * 32); i += S::kThreads) {
      const int slot = i / S::kLanes, row = min(slot, count - 1);
      take(first + row, row, lane * S::kOfLane, slot == row);
    }
    __syncthreads();
  }
}
template <class S>
CRATE_DEVICE float sum_of_lanes(float v) {
#pragma unroll
  for (int step = 1; step < S::kLanes; step *= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

// Puts the membership of a token down and writes it, from its sums of w^2 / c by vector; similarity(h, sum) is q.
template <class S, class Similarity>
CRATE_DEVICE void softmax_of_heads(const float* by_vector, const float (&temp)[S::kOfLane], Similarity similarity,
                                   bool seen, int n, int first, bool own, const TssaRows& stored, float* members) {
  constexpr int kOfLane = S::kOfLane;
  float power[kOfLane], largest = -INFINITY, sum = 0.0f;  // (kOfLane heads,) of a token
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const int h = first + j;
    power[j] = similarity(h, sum_of<S::kPerHead>(by_vector + h * S::kPerHead)) * temp[j];
    largest = fmaxf(largest, power[j]);
  }
#pragma unroll
  for (int step = 1; step < S::kLanes; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    power[j] = exp2_fast(power[j] - largest);
    sum += power[j];
  }
  const float inverse = inverse_fast(sum_of_lanes<S>(sum));
  if (!own) return;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    // Without a key, the membership is 0, and with it out and every gradient.
    const float member = seen ? power[j] * inverse : 0.0f;
    members[n * S::kHeads + first + j] = member;
    stored(n, first + j) = member;
  }
}

// Puts the gradient of a token's logits down, from that of its membership by the lane's heads.
template <class S>
CRATE_DEVICE void through_softmax(float (&d)[S::kOfLane], const float* members, int n, int first, bool own,
                                  float* dlogit) {
  float member[S::kOfLane], mean[2] = {};  // (kOfLane heads,) of a token
#pragma unroll
  for (int j = 0; j < S::kOfLane; ++j) member[j] = members[n * S::kHeads + first + j];
  // The mean is subtracted twice: see softmax_backward of heads.cuh.
#pragma unroll
  for (int time = 0; time < 2; ++time) {
#pragma unroll
    for (int j = 0; j < S::kOfLane; ++j) mean[time] += member[j] * d[j];
    mean[time] = sum_of_lanes<S>(mean[time]);
#pragma unroll
    for (int j = 0; j < S::kOfLane; ++j) d[j] -= mean[time];
  }
  if (!own) return;
#pragma unroll
  for (int j = 0; j < S::kOfLane; ++j) dlogit[n * S::kHeads + first + j] = member[j] * d[j];
}

// Which tokens of the block are keys, as factors of the sums.
template <class S>
CRATE_DEVICE void put_key_weights(const TssaProblem& p, const TssaSpan& s, float* to) {
  if constexpr (S::kMasked) {
    const TssaMask key_mask = key_mask_of(p, s);
    for (int n = threadIdx.x; n < s.rows(); n += S::kThreads) to[n] = enters_sums(key_mask, n);
  }
}
template <class S>
CRATE_DEVICE float key_weight(const float* key_weights, int n) {
  return S::kMasked ? key_weights[n] : 1.0f;
}

// The factor of four channels in out: channel_gate of full_steps.cuh.
CRATE_DEVICE float4 gates_of(const TssaProblem& p, float4 moment, int index, int h, int d) {
  float4 gate = by_each(moment, [](float m) { return inverse_of(1.0f + m); });
  if (p.seed != nullptr) {
    const uint32_t bits = kept_by_dropout(p, index, h, 0, 1, d, 4);
    gate = make_float4(bits & 1 ? gate.x * p.keep_factor : 0.0f, bits & 2 ? gate.y * p.keep_factor : 0.0f,
                       bits & 4 ? gate.z * p.keep_factor : 0.0f, bits & 8 ? gate.w * p.keep_factor : 0.0f);
  }
  return gate;
}

}  // namespace crate_kernels
