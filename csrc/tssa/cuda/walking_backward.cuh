// walking.cuh, backward: from the last step of a sequence to the first, over sums of w^2 and Pi w^2 before each step,
// which are in sums_1: the forward has saved them, p.sums_every is a step's tokens. Reads w and dout once and writes dw
// once, in one launch. Without saved sums they come first, forwards: this reads w twice, but for a sequence's last
// step.
//
// A thread goes through its tokens forwards for sums, and backwards for gradients, kWalkTile tokens at a time: what is
// before a tile is added up again. The part of dw that needs no softmax waits in the place of dout, rounded
// (TssaWalkingParts).
#pragma once

#include "walking_backward_steps.cuh"

namespace crate_kernels {

constexpr int kWalkTile = 4;

// Places in the block's shared memory, in floats. walking.py has the same.
template <class S>
struct TssaWalkingBackShared {
  static constexpr int kAll = S::kGroups * S::kSums;
  static constexpr int kFirst = 4, kSecond = kFirst + S::kSums, kOwn = kSecond + S::kSums;
  static constexpr int kOwnEnergies = kOwn + S::kSums, kDtemp = kOwnEnergies + S::kWidth;
  static constexpr int kSlopes = kDtemp + (S::kHeads + 3) / 4 * 4, kEnergies = kSlopes + 2 * S::kSums;
  static constexpr int kMomentsBefore = kEnergies + 2 * S::kWidth, kEnergiesBefore = kMomentsBefore + kAll;
  static constexpr int kGroups = kEnergiesBefore + kAll, kTokens = kGroups + kAll;
  int size, by_head, members, dlogit, dmass, key_weights, rows;

  CRATE_DEVICE explicit TssaWalkingBackShared(int chunk) {
    const auto four = [](int n) { return (n + 3) / 4 * 4; };
    size = chunk * S::kWidth / 2, by_head = four(chunk * S::kHeads);
    members = kTokens + 2 * S::kBuffers * size;
    dlogit = members + S::kBuffers * by_head;
    dmass = dlogit + by_head;
    key_weights = dmass + by_head;
    rows = key_weights + four(chunk);
  }
};

// Fetches a step's w, dout and membership, as TssaBackwardFetch.
template <class S>
struct TssaWalkingBackFetch {
  using Shared = TssaWalkingBackShared<S>;
  const TssaBackward& b;
  TssaLayout<S> w_layout, dout_layout;
  uint32_t base;  // of shared memory
  Shared at;

  CRATE_DEVICE uint32_t tokens(int buffer, int copy) const {
    return base + 4 * (Shared::kTokens + (2 * buffer + copy) * at.size);
  }
  CRATE_DEVICE uint32_t barrier(int buffer) const { return base + 8 * buffer; }

  CRATE_DEVICE void operator()(const TssaSteps<S, true>& steps, int buffer) const {
    if (steps.there()) {
      const TssaSpan s = steps.span();
      const int rows = s.rows(), copies = steps.number < 0 ? 1 : 2;
      if (threadIdx.x == 0) mbarrier_expect(barrier(buffer), rows * S::kWidth * 2 * copies);
      bulk_tokens<S>(b.problem, b.w, s, w_layout, tokens(buffer, 0), barrier(buffer));
      if (copies == 2) bulk_tokens<S>(b.problem, b.dout, s, dout_layout, tokens(buffer, 1), barrier(buffer));
      const TssaRows stored = rows_of(b.problem, b.membership, s);
      const uint32_t members = base + 4 * (at.members + buffer * at.by_head);
      for (int i = threadIdx.x; i < rows * S::kHeads; i += S::kThreads) {
        const int h = i / rows, n = i - h * rows;
        copy_async_4(members + 4 * (n * S::kHeads + h), &stored(n, h));
      }
    }
    copy_async_commit();
  }
  // The membership is there for all threads behind a barrier of the block.
  CRATE_DEVICE void wait(int buffer, uint32_t phase) const {
    copy_async_wait<S::kBuffers - 1>();
    mbarrier_wait(barrier(buffer), phase);
  }
};

template <class T, int HEADS, int HEAD_DIM, int CLUSTER, int THREADS, int BUFFERS, bool MASKED>
__global__ void __launch_bounds__(THREADS, 512 / THREADS) tssa_causal_bwd_walking_kernel(TssaBackward b) {
  using S = TssaSizes<T, HEADS, HEAD_DIM, CLUSTER, THREADS, BUFFERS, MASKED>;
  using Shared = TssaWalkingBackShared<S>;
  const TssaProblem& p = b.problem;
  const Shared at(p.chunk_size);
  float* const memory = reinterpret_cast<float*>(shared_memory());
  float *const first = memory + Shared::kFirst, *const second = memory + Shared::kSecond,
               *const moments = memory + Shared::kMomentsBefore, *const energies = memory + Shared::kEnergiesBefore,
               *const groups = memory + Shared::kGroups, *const dlogit = memory + at.dlogit,
               *const dmass = memory + at.dmass, *const key_weights = memory + at.key_weights,
               *const by_vector = memory + at.rows;
  double* const carried_slopes = reinterpret_cast<double*>(memory + Shared::kSlopes);
  double* const carried_energies = reinterpret_cast<double*>(memory + Shared::kEnergies);
  const TssaVectorOf<S> v;
  const TssaLayout<S> w_layout(b.w, p.chunk_size), dout_layout(b.dout, p.chunk_size);
  const TssaWalkingBackFetch<S> fetch = {b, w_layout, dout_layout, shared_address(memory), at};
  const int group = v.group * S::kSums, column = group + v.column(), of_head = group + S::kWidth + v.head;
  const float factor = p.seed == nullptr ? 1.0f : p.keep_factor;
  double dtemp = 0.0;

  each_step<S, true>(p, fetch, [&](const TssaSteps<S, true>& steps, int buffer, uint32_t phase) {
    const TssaSpan s = steps.span();
    // With saved sums no number is below 0: said once more, it spares two registers.
    const bool forwards = p.sums_every == 0 && steps.number < 0, start = steps.number == 0;
    const int rows = s.rows();
    const TssaGroup<S> own(p, v, rows);
    const float* const members = memory + at.members + buffer * at.by_head;
    const TssaWalkingTokens<S> tokens = {first_of(v, w_layout, fetch.tokens(buffer, 0), own.first),
                                         first_of(v, dout_layout, fetch.tokens(buffer, 1), own.first),
                                         2 * w_layout.token,
                                         2 * dout_layout.token,
                                         members + own.first * HEADS + v.head,
                                         key_weights + own.first};
    TssaWalkingParts<S> parts = {tokens};
    put_key_weights<S>(p, s, key_weights);
    fetch.wait(buffer, phase);
    __syncthreads();
    if (!forwards) drop_gradients<S>(p, s, v, own, tokens);
    {
      float sums[8] = {}, unused = 0.0f;  // (8 channels,) per thread
      tokens.template add<false>(0, own.count, sums, unused);
      put_vector(energies + column, sums);
    }
    {
      float sums[8] = {}, mass = 0.0f;  // (8 channels,) per thread; of its head
      tokens.template add<true>(0, own.count, sums, mass);
      put_vector(moments + column, sums);
      if (v.channel == 0) moments[of_head] = mass * kWalkScale;
    }
    __syncthreads();
    // Peers may still read what the step before has put down: what comes forwards alternates.
    const bool elsewhere = forwards && steps.number % 2 != 0;
    float* const own_moments = elsewhere ? first : memory + Shared::kOwn;
    float* const own_energies = elsewhere ? second : memory + Shared::kOwnEnergies;
    add_groups<S, S::kSums>(moments, own_moments);
    add_groups<S, S::kWidth>(energies, own_energies);
    cluster_sync();
    const int number = steps.before();
    float* const through_step = b.sums_1 + step_sums_place<S>(p, s.index, S::kCluster * p.chunk_size, number);
    if (forwards) {
      keep_sums<S, S::kSums>(own_moments, carried_slopes, through_step, number == 0);
      keep_sums<S, S::kWidth>(own_energies, carried_energies, through_step + S::kSums, number == 0);
      return;
    }
    const float* const before = number == 0 ? nullptr : through_step - (S::kSums + S::kWidth);
    before_groups_of<S, S::kSums>(own_moments, before, moments);
    before_groups_of<S, S::kWidth>(own_energies, before == nullptr ? nullptr : before + S::kSums, energies);
    __syncthreads();
    {
      // (8 channels,) per thread; of its head
      float running[8], acc[8] = {}, mass = moments[of_head] * (1.0f / kWalkScale);
      get_vector(moments + column, running);
#pragma unroll 2
      for (int t = 0; t < own.count; ++t) {
        float x[8], g[8], through[2] = {};  // (8 channels,) of a token
        tokens.load(t, x);
        tokens.load_gradient(t, g);
        const float member = tokens.member(t), weight = member * tokens.counted(t), scaled = weight * kWalkScale;
        mass += weight;
        const float floored = mass + kMassFloor, shifted = floored * kWalkScale, gates = shifted * factor,
                    per = member * kWalkScale;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          running[i] += x[i] * x[i] * scaled;
          const float inverse = inverse_fast(running[i] + shifted),
                      per_mass = g[i] * (inverse * gates) * x[i] * inverse;
          acc[i] += per_mass * per;
          through[i % 2] += per_mass * running[i];
        }
        by_vector[(own.first + t) * S::kRow + v.vector] = -(through[0] + through[1]) * (member * inverse_fast(floored));
      }
      put_vector(groups + column, acc);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * HEADS; i += THREADS) {
      const int n = i / HEADS, h = i - n * HEADS;
      dmass[i] = sum_of<S::kPerHead>(by_vector + n * S::kRow + h * S::kPerHead);
    }
    add_groups<S, S::kWidth>(groups, first);
    __syncthreads();
    if (threadIdx.x < HEADS) {
      const int h = static_cast<int>(threadIdx.x);
      float sum = 0.0f;
#pragma unroll 4
      for (int n = rows - 1; n >= 0; --n) dmass[n * HEADS + h] = sum += dmass[n * HEADS + h];
      first[S::kWidth + h] = sum;
      for (int g = 0; g < S::kGroups; ++g) groups[g * S::kSums + S::kWidth + h] = 0.0f;  // it is of the block
    }
    cluster_sync();
    behind_groups<S, S::kSums>(first, carried_slopes, groups, start);
    __syncthreads();
    {
      float later[8];  // (8 channels,) per thread, of the tokens behind
      get_vector(groups + column, later);
#pragma unroll 1
      for (int tile = (own.count - 1) / kWalkTile * kWalkTile; tile >= 0; tile -= kWalkTile) {
        // (8 channels,), (kWalkTile tokens, 8) per thread; (kWalkTile,) and the running one of its head
        float running[8], sums[kWalkTile][8], masses[kWalkTile], mass = moments[of_head] * (1.0f / kWalkScale);
        get_vector(moments + column, running);
        tokens.template add<true>(0, tile, running, mass);
#pragma unroll
        for (int r = 0; r < kWalkTile; ++r) {
          if (tile + r < own.count) tokens.template add_one<true>(tile + r, running, mass);
          masses[r] = (mass + kMassFloor) * kWalkScale;
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[r][i] = running[i];
        }
#pragma unroll
        for (int r = kWalkTile - 1; r >= 0; --r) {
          const int t = tile + r;
          if (t >= own.count) continue;
          float x[8], g[8], row[2] = {};  // (8 channels,) of a token
          tokens.load(t, x);
          tokens.load_gradient(t, g);
          const float member = tokens.member(t), counted = tokens.counted(t), twice = 2.0f * member * counted,
                      gates = masses[r] * factor, per = member * kWalkScale;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float inverse = inverse_fast(sums[r][i] + masses[r]), gate = g[i] * (inverse * gates),
                        product = gate * x[i];
            later[i] += product * inverse * per;
            const float slope = later[i] * x[i];
            row[i % 2] += (MASKED ? counted * slope * x[i] : slope * x[i]) - product;
            g[i] = twice * slope - gate * member;
          }
          by_vector[(own.first + t) * S::kRow + v.vector] = row[0] + row[1];
          parts.put(t, g);
        }
      }
    }
    __syncthreads();
    {
      const TssaRows dmembership = optional_rows_of(p, b.dmembership, s), stored = rows_of(p, b.dlogit, s);
      const float* const behind = groups + S::kWidth;
      each_row<S>(rows, [&](int n, int head, bool own_row) {
        const float counted = key_weight<S>(key_weights, n);
        float d[S::kOfLane];  // (kOfLane heads,) of a token
#pragma unroll
        for (int j = 0; j < S::kOfLane; ++j) {
          const int h = head + j;
          d[j] = sum_of<S::kPerHead>(by_vector + n * S::kRow + h * S::kPerHead) +
                 (dmass[n * HEADS + h] + behind[h]) * counted;
          if (dmembership.data != nullptr) d[j] += dmembership(n, h);
        }
        through_softmax<S>(d, members, n, head, own_row, dlogit);
#pragma unroll
        for (int j = 0; j < S::kOfLane && own_row && b.bias != nullptr; ++j)
          stored(n, head + j) = dlogit[n * HEADS + head + j];
      });
    }
    __syncthreads();
    const float* const dlogits = dlogit + own.first * HEADS + v.head;
    {
      float running[8], acc[8] = {}, through_temp = 0.0f;  // (8 channels,) per thread; of its head
      get_vector(energies + column, running);
      const float* const bias = b.bias == nullptr ? nullptr : b.bias + v.head * b.bias_tokens + s.first + own.first;
#pragma unroll 2
      for (int t = 0; t < own.count; ++t) {
        float x[8], similarity = 0.0f;  // (8 channels,) of a token
        tokens.load(t, x);
        const float gradient = dlogits[t * HEADS], scale = tokens.counted(t) * kWalkScale;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float square = x[i] * x[i];
          running[i] += square * scale;
          const bool above = running[i] > kCausalFloor * kWalkScale;
          const float inverse = inverse_fast(floored(running[i], kCausalFloor * kWalkScale)),
                      ratio = gradient * kWalkScale * inverse * square;
          similarity += ratio;
          acc[i] += above ? ratio * inverse : 0.0f;
        }
        if (bias != nullptr && v.channel == 0) similarity += gradient * (HEAD_DIM * bias[t]);
        through_temp += similarity;
      }
      dtemp = (start ? 0.0 : dtemp) + static_cast<double>(through_temp);
      put_vector(groups + column, acc);
    }
    __syncthreads();
    add_groups<S, S::kWidth>(groups, second);
    cluster_sync();
    behind_groups<S, S::kWidth>(second, carried_energies, groups, start);
    __syncthreads();
    {
      float later[8];  // (8 channels,) per thread, of the tokens behind
      get_vector(groups + column, later);
      const float twice = 2.0f * p.temp[v.head];
      const TssaTokens dw = part_of(p, b.dw, s);
      T* const to = reinterpret_cast<T*>(dw.data) + dw.at(own.first, v.head, v.channel);
#pragma unroll 1
      for (int tile = (own.count - 1) / kWalkTile * kWalkTile; tile >= 0; tile -= kWalkTile) {
        float running[8], earlier[kWalkTile][8], unused = 0.0f;  // (8 channels,), (kWalkTile tokens, 8) per thread
        get_vector(energies + column, running);
        tokens.template add<false>(0, tile, running, unused);
#pragma unroll
        for (int r = 0; r < kWalkTile; ++r) {
#pragma unroll
          for (int i = 0; i < 8; ++i) earlier[r][i] = running[i];
          if (r + 1 < kWalkTile && tile + r < own.count) tokens.template add_one<false>(tile + r, running, unused);
        }
#pragma unroll
        for (int r = kWalkTile - 1; r >= 0; --r) {
          const int t = tile + r;
          if (t >= own.count) continue;
          float x[8], part[8];  // (8 channels,) of a token
          tokens.load(t, x);
          parts.load(t, part);
          const float gradient = dlogits[t * HEADS] * kWalkScale, counted = tokens.counted(t),
                      scale = counted * kWalkScale;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float square = x[i] * x[i], sum = earlier[r][i] + square * scale;
            const bool above = sum > kCausalFloor * kWalkScale;
            const float inverse = inverse_fast(floored(sum, kCausalFloor * kWalkScale)), per = gradient * inverse;
            // The token's own part, 1 / c - w^2 / c^2, is one term, so that a first token's cancels exactly.
            const float of_token = per * (above ? earlier[r][i] * inverse : 1.0f);
            part[i] += twice * x[i] * (of_token - later[i] * scale);
            later[i] += above ? per * square * inverse : 0.0f;
          }
          store_vector(to + t * dw.token, part);
        }
      }
    }
    fence_async_shared();  // the gradients' places were written
    if (steps.number + 1 == steps.count) {
      by_vector[threadIdx.x] = static_cast<float>(dtemp);
      __syncthreads();
      float* const dtemps = memory + Shared::kDtemp;
      if (threadIdx.x < HEADS) {
        float sum = 0.0f;
        for (int g = 0; g < S::kGroups; ++g)
          sum += sum_of<S::kPerHead>(by_vector + g * S::kVectors + threadIdx.x * S::kPerHead);
        dtemps[threadIdx.x] = sum;
      }
      cluster_sync();
      if (s.chunk == 0 && threadIdx.x < HEADS)
        b.dtemp[static_cast<int64_t>(s.index) * HEADS + threadIdx.x] = total_of<S>(dtemps + threadIdx.x);
    }
    if (s.chunk == 0) clear_uncovered(p, TssaHalves{{p.dtype}}, b.dw, nullptr, s);
  });
  copy_async_wait<0>();  // of no copies
}

}  // namespace crate_kernels
