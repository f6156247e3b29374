// walking.cuh, forward: reads w once and writes out and the membership once, in one launch. What it saves for a
// backward are the sums through every p.sums_every-th token, wherever in a step that is.
#pragma once

#include "walking.cuh"

namespace crate_kernels {

// Places in the block's shared memory, in floats. walking.py has the same.
template <class S>
struct TssaWalkingShared {
  static constexpr int kFirst = 4, kSecond = kFirst + S::kSums, kEnergies = kSecond + S::kSums;
  static constexpr int kMoments = kEnergies + 2 * S::kWidth, kFacts = kMoments + 2 * S::kSums, kTokens = kFacts + 4;
  int size;         // of a step's tokens, (chunk, kWidth) of 16 bits
  int members;      // (chunk, kHeads)
  int key_weights;  // (chunk,)
  int scratch;

  CRATE_DEVICE explicit TssaWalkingShared(int chunk) {
    const auto four = [](int n) { return (n + 3) / 4 * 4; };
    size = chunk * S::kWidth / 2;
    members = kTokens + S::kBuffers * size;
    key_weights = members + four(chunk * S::kHeads);
    scratch = key_weights + four(chunk);
  }
};

// Fetches a step's tokens into a buffer; all threads of the block call it, and then wait.
template <class S>
struct TssaWalkingFetch {
  using Shared = TssaWalkingShared<S>;
  const TssaForward& f;
  TssaLayout<S> layout;
  uint32_t base;  // of shared memory
  int size;

  CRATE_DEVICE uint32_t tokens(int buffer) const { return base + 4 * (Shared::kTokens + buffer * size); }
  CRATE_DEVICE uint32_t barrier(int buffer) const { return base + 8 * buffer; }

  CRATE_DEVICE void operator()(const TssaSteps<S, false>& steps, int buffer) const {
    if (!steps.there()) return;
    const TssaSpan s = steps.span();
    if (threadIdx.x == 0) mbarrier_expect(barrier(buffer), s.rows() * S::kWidth * 2);
    bulk_tokens<S>(f.problem, f.w, s, layout, tokens(buffer), barrier(buffer));
  }
  CRATE_DEVICE void wait(int buffer, uint32_t phase) const { mbarrier_wait(barrier(buffer), phase); }
};

// The first key of a sequence, or its length. For the first warp.
CRATE_DEVICE int find_first_key(const TssaProblem& p, int index) {
  const TssaSpan s = sequence_of(p, index);
  const TssaMask key_mask = key_mask_of(p, s);
  int first = s.count;
  for (int n = threadIdx.x; n < first; n += kWarp)
    if (key_mask(n, 0)) first = n;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) first = min(first, __shfl_xor_sync(kAllLanes, first, step));
  return first;
}

// Calls each(n) for the tokens of a thread's group in turn, and save(to) behind those whose sums are saved: of a
// sequence's last one they are not.
template <class S, class Each, class Save>
CRATE_DEVICE void each_saving(const TssaForward& f, const TssaSpan& s, const TssaGroup<S>& own, Each each, Save save) {
  const TssaProblem& p = f.problem;
  const int last = own.first + own.count, every = p.sums_every, ends = s.count - s.first;
  int next = ends;  // the row behind the next of them
  if (every != 0) next = ((s.first + own.first) / every + 1) * every - s.first;
#pragma unroll 1
  for (int n = own.first; n < last; next += every) {
    const int stop = min(last, next);
#pragma unroll 4
    for (; n < stop; ++n) each(n);
    if (n == next && n < ends) save(f.sums_1 + step_sums_place<S>(p, s.index, every, (s.first + n) / every - 1));
  }
}

template <class T, int HEADS, int HEAD_DIM, int CLUSTER, int THREADS, int BUFFERS, bool MASKED>
__global__ void __launch_bounds__(THREADS, 768 / THREADS) tssa_causal_fwd_walking_kernel(TssaForward f) {
  using S = TssaSizes<T, HEADS, HEAD_DIM, CLUSTER, THREADS, BUFFERS, MASKED>;
  using Shared = TssaWalkingShared<S>;
  const TssaProblem& p = f.problem;
  const Shared at(p.chunk_size);
  float* const memory = reinterpret_cast<float*>(shared_memory());
  float *const first = memory + Shared::kFirst, *const second = memory + Shared::kSecond,
               *const members = memory + at.members, *const key_weights = memory + at.key_weights,
               *const scratch = memory + at.scratch;
  int* const first_key = reinterpret_cast<int*>(memory + Shared::kFacts);
  double* const energies = reinterpret_cast<double*>(memory + Shared::kEnergies);
  double* const moments = reinterpret_cast<double*>(memory + Shared::kMoments);
  const TssaVectorOf<S> v;
  const TssaLayout<S> layout(f.w, p.chunk_size);
  const TssaWalkingFetch<S> fetch = {f, layout, shared_address(memory), at.size};
  float* const sums = scratch + v.group * S::kSums;  // of the thread's group
  float temp[S::kOfLane];                            // in bits
#pragma unroll
  for (int j = 0; j < S::kOfLane; ++j)
    temp[j] = p.temp[static_cast<int>(threadIdx.x) % S::kLanes * S::kOfLane + j] * 1.4426950408889634f;

  each_step<S, false>(p, fetch, [&](const TssaSteps<S, false>& steps, int buffer, uint32_t phase) {
    const TssaSpan s = steps.span();
    const bool start = steps.number == 0;
    const int rows = s.rows();
    const TssaGroup<S> own(p, v, rows);
    const uint32_t tokens = first_of(v, layout, fetch.tokens(buffer), own.first);
    const int pitch = 2 * layout.token;
    put_key_weights<S>(p, s, key_weights);
    if constexpr (MASKED) {
      if (start && threadIdx.x < kWarp) {
        const int from = find_first_key(p, s.index);
        if (threadIdx.x == 0) *first_key = from;
      }
      __syncthreads();
    }
    fetch.wait(buffer, phase);
    {
      float acc[8] = {};  // (8 channels,) per thread
      uint32_t from = tokens;
#pragma unroll 4
      for (int n = own.first; n < own.first + own.count; ++n, from += pitch) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float scale = kWalkScale * key_weight<S>(key_weights, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] += x[i] * x[i] * scale;
      }
      put_vector(sums + v.column(), acc);
    }
    __syncthreads();
    add_groups<S, S::kWidth>(scratch, first);
    cluster_sync();
    before_groups<S, S::kWidth>(first, energies, scratch, start);
    __syncthreads();
    float running[8];  // (8 channels,) per thread
    get_vector(sums + v.column(), running);
    __syncthreads();
    {
      uint32_t from = tokens;
      float* to = scratch + own.first * S::kRow + v.vector;
      const auto ratios_of = [&](int n) {
        float x[8], ratios[2] = {};  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float scale = kWalkScale * key_weight<S>(key_weights, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float square = x[i] * x[i];
          running[i] += square * scale;
          ratios[i % 2] += square * inverse_fast(floored(running[i], kCausalFloor * kWalkScale));
        }
        *to = ratios[0] + ratios[1];
        from += pitch, to += S::kRow;
      };
      each_saving<S>(f, s, own, ratios_of, [&](float* saved) { put_vector(saved + S::kSums + v.column(), running); });
    }
    __syncthreads();
    const TssaRows stored = rows_of(p, f.membership, s);
    each_row<S>(rows, [&](int n, int head, bool own_row) {
      const int64_t position = s.first + n;
      const bool seen = !MASKED || position >= *first_key;
      // Only padded tokens, whose output is not read, are past the end.
      const float* const bias = f.bias == nullptr ? nullptr : f.bias + min(position, f.bias_tokens - 1);
      const auto similarity = [&](int h, float ratios) {
        const float own_ratios = ratios * kWalkScale;
        return bias == nullptr ? own_ratios : own_ratios + HEAD_DIM * bias[h * f.bias_tokens];
      };
      softmax_of_heads<S>(scratch + n * S::kRow, temp, similarity, seen, n, head, own_row, stored, members);
    });
    __syncthreads();
    {
      float acc[8] = {}, mass = 0.0f;  // (8 channels,) per thread; of its head
      uint32_t from = tokens;
#pragma unroll 4
      for (int n = own.first; n < own.first + own.count; ++n, from += pitch) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float weight = members[n * HEADS + v.head] * key_weight<S>(key_weights, n), scaled = weight * kWalkScale;
        mass += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] += x[i] * x[i] * scaled;
      }
      put_vector(sums + v.column(), acc);
      if (v.channel == 0) sums[S::kWidth + v.head] = mass;
    }
    __syncthreads();
    add_groups<S, S::kSums>(scratch, second);
    cluster_sync();
    before_groups<S, S::kSums>(second, moments, scratch, start);
    __syncthreads();
    {
      float mass = sums[S::kWidth + v.head];
      get_vector(sums + v.column(), running);
      const TssaTokens out = part_of(p, f.out, s);
      T* to = reinterpret_cast<T*>(out.data) + out.at(own.first, v.head, v.channel);
      uint32_t from = tokens;
      const auto output_of = [&](int n) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float member = members[n * HEADS + v.head], weight = member * key_weight<S>(key_weights, n),
                    scaled = weight * kWalkScale;
        mass += weight;
        const float masses = (mass + kMassFloor) * kWalkScale, factor = -member * masses;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          running[i] += x[i] * x[i] * scaled;
          x[i] *= factor * inverse_fast(running[i] + masses);  // A = 1 / (1 + M) without the division of M
        }
        if (p.seed != nullptr) {
          const uint32_t bits = kept_by_dropout(p, s.index, v.head, s.first + n, 1, v.channel, 8);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] *= bits >> i & 1 ? p.keep_factor : 0.0f;
        }
        store_vector(to, x);
        from += pitch, to += out.token;
      };
      each_saving<S>(f, s, own, output_of, [&](float* saved) {
        put_vector(saved + v.column(), running);
        if (v.channel == 0) saved[S::kWidth + v.head] = mass * kWalkScale;
        for (int h = HEADS; h < S::kSums - S::kWidth && v.vector == 0; ++h) saved[S::kWidth + h] = 0.0f;
      });
    }
    if (s.chunk == 0) clear_uncovered(p, TssaHalves{{p.dtype}}, f.out, f.membership, s);
  });
}

}  // namespace crate_kernels
