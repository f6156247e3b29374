// The kernels of the causal forward, which causal.cuh describes.
#pragma once

#include "causal.cuh"

namespace crate_kernels {

// Offset of a block's sums in sums_1 and sums_2.
CRATE_DEVICE int64_t sums_place(const TssaProblem& p, const TssaSpan& s) {
  return (static_cast<int64_t>(s.index) * (p.nchunks + 1) + s.chunk) * (p.width + p.nheads);
}

// A chunk's sums of w^2, and the number of its keys.
template <class Access>
__global__ void __launch_bounds__(512, 1) tssa_causal_fwd_energy_kernel(TssaForward f, Access access) {
  const TssaProblem& p = f.problem;
  const TssaSpan s = chunk_of(p);
  causal_energies(p, access, part_of(p, f.w, s), key_mask_of(p, s), s.rows(), f.sums_1 + sums_place(p, s));
}

// A chunk's output, from the membership and the sums before it.
template <class Access>
__global__ void __launch_bounds__(512, 1) tssa_causal_fwd_output_kernel(TssaForward f, Access access) {
  constexpr int N = Access::kCount;
  const TssaProblem& p = f.problem;
  const TssaSpan s = chunk_of(p);
  const TssaTokens w = part_of(p, f.w, s), out = part_of(p, f.out, s);
  const TssaMask key_mask = key_mask_of(p, s);
  const TssaRows members = rows_of(p, f.membership, s);
  const float *const sums = f.sums_2 + sums_place(p, s), *const masses = sums + p.width;
  each_vector<N>(p, [&](int, int h, int d) {
    TssaMoments<N> running;
    running.start({sums, nullptr}, {masses, nullptr}, h * p.head_dim + d, h);
#pragma unroll 1
    for (int first = 0; first < s.rows(); first += kCausalAhead) {
      float x[kCausalAhead][N];  // (kCausalAhead tokens, N channels) per thread
      load_ahead(access, w, first, s.rows(), h, d, x);
      const uint32_t kept = kept_elements<N>(p, s, first, kCausalAhead, h, d);
#pragma unroll
      for (int r = 0; r < kCausalAhead; ++r) {
        if (first + r >= s.rows()) break;
        running.output(x[r], members(first + r, h), enters_sums(key_mask, first + r));
        drop(p, kept >> r * N, x[r]);
        access.store(out, first + r, h, d, x[r]);
      }
    }
  });
  if (s.chunk == 0) clear_uncovered(p, access, f.out, f.membership, s);
}

// The logits of a tile's tokens, channel by channel: the terms of q, added up over each vector.
template <class Access>
CRATE_DEVICE void ratios_of_tile(const TssaProblem& p, const Access& access, const TssaTokens& w,
                                 const TssaMask& key_mask, int tile, int rows, const TssaBefore& before_chunk,
                                 float* energy, float* partial) {
  constexpr int N = Access::kCount;
  const int vectors = p.width / N;
  each_vector<N>(p, [&](int v, int h, int d) {
    const int column = h * p.head_dim + d;
    float before[N], sum[N];  // (N channels,) per thread
#pragma unroll
    for (int i = 0; i < N; ++i) {
      before[i] = before_chunk[column + i];
      sum[i] = energy[column + i];
    }
#pragma unroll 1
    for (int part = 0; part < kCausalTile && tile + part < rows; part += kCausalAhead) {
      float x[kCausalAhead][N];  // (kCausalAhead tokens, N channels) per thread
      load_ahead(access, w, tile + part, rows, h, d, x);
#pragma unroll
      for (int r = 0; r < kCausalAhead; ++r) {
        const int n = tile + part + r;
        const float counted = n < rows ? enters_sums(key_mask, n) : 0.0f;
        float some = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float square = x[r][i] * x[r][i];
          sum[i] += square * counted;
          some += square / floored(before[i] + sum[i], kCausalFloor);
        }
        partial[(part + r) * vectors + v] = some;
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) energy[column + i] = sum[i];
  });
}

// The membership of a chunk, with its sums of Pi w^2 and Pi. If a sequence is one chunk (`alone`): the output too,
// starting from the state of a cache, which is advanced.
template <class Access>
__global__ void __launch_bounds__(512, 1) tssa_causal_fwd_members_kernel(TssaForward f, Access access) {
  constexpr int N = Access::kCount;
  const TssaProblem& p = f.problem;
  const TssaSpan s = chunk_of(p);
  const bool alone = f.sums_1 == nullptr, has_state = f.lengths != nullptr;
  const int rows = s.rows(), vectors = p.width / N, per_head = p.head_dim / N;
  const TssaTokens w = part_of(p, f.w, s), out = part_of(p, f.out, s);
  const TssaMask key_mask = key_mask_of(p, s);
  const TssaRows stored = rows_of(p, f.membership, s);
  const int64_t mine = sums_place(p, s), channels = static_cast<int64_t>(s.index) * p.width;
  const int64_t heads = static_cast<int64_t>(s.index) * p.nheads;
  TssaBefore energies = {}, moments = {}, masses = {};
  if (!alone) {
    energies.sums = f.sums_1 + mine;
  } else if (has_state) {
    energies.state = f.state_energy + channels;
    moments.state = f.state_moment + channels;
    masses.state = f.state_mass + heads;
  }
  const int position = has_state ? max(f.lengths[s.index], 0) : 0;
  int keys = position + (alone ? 0 : static_cast<int>(energies[p.width]));
  const TssaCausalShared layout(p, N);
  unsigned char* const memory = shared_memory();
  float *const energy = reinterpret_cast<float*>(memory + layout.energy),
               *const moment = reinterpret_cast<float*>(memory + layout.moment),
               *const mass = reinterpret_cast<float*>(memory + layout.mass),
               *const partial = reinterpret_cast<float*>(memory + layout.partial),
               *const members = reinterpret_cast<float*>(memory + layout.members);
  double* const logits = reinterpret_cast<double*>(memory + layout.logits);
  // Each thread sets only values of its own: no barrier.
  each_vector<N>(p, [&](int v, int h, int d) {
    mass[v] = 0.0f;
    for (int i = 0; i < N; ++i) energy[h * p.head_dim + d + i] = moment[h * p.head_dim + d + i] = 0.0f;
  });

  for (int tile = 0; tile < rows; tile += kCausalTile) {
    const int count = min(rows - tile, kCausalTile);
    ratios_of_tile(p, access, w, key_mask, tile, rows, energies, energy, partial);
    __syncthreads();
    for (int pair = threadIdx.x; pair < count * p.nheads; pair += blockDim.x) {
      const int r = pair / p.nheads, h = pair - r * p.nheads;
      double similarity = 0.0;
      for (int v = 0; v < per_head; ++v) similarity += partial[r * vectors + h * per_head + v];
      if (f.bias != nullptr) {
        // Only padded tokens, whose output is not read, are past the end.
        const int64_t n = static_cast<int64_t>(position) + s.first + tile + r;
        similarity += static_cast<double>(p.head_dim) * f.bias[h * f.bias_tokens + min(n, f.bias_tokens - 1)];
      }
      logits[pair] = p.temp[h] * similarity;
    }
    __syncthreads();
    for (int r = threadIdx.x / kWarp; r < count; r += blockDim.x / kWarp) {
      int seen = keys;
      for (int earlier = 0; earlier <= r; ++earlier) seen += enters_sums(key_mask, tile + earlier) > 0.0f;
      softmax_over_heads(p, logits + r * p.nheads, p.mask.data == nullptr || seen > 0, stored, tile + r,
                         [&](int h, float member) { members[r * p.nheads + h] = member; });
    }
    __syncthreads();
    each_vector<N>(p, [&](int v, int h, int d) {
      const int column = h * p.head_dim + d;
      TssaMoments<N> running;
      running.start(moments, masses, column, h);
      running.mass = mass[v];
#pragma unroll
      for (int i = 0; i < N; ++i) running.sum[i] = moment[column + i];
#pragma unroll 1
      for (int part = 0; part < count; part += kCausalAhead) {
        float x[kCausalAhead][N];  // (kCausalAhead tokens, N channels) per thread
        load_ahead(access, w, tile + part, rows, h, d, x);
        const uint32_t kept = alone ? kept_elements<N>(p, s, tile + part, kCausalAhead, h, d) : 0;
#pragma unroll
        for (int r = 0; r < kCausalAhead; ++r) {
          if (part + r >= count) break;
          running.output(x[r], members[(part + r) * p.nheads + h], enters_sums(key_mask, tile + part + r));
          if (!alone) continue;
          drop(p, kept >> r * N, x[r]);
          access.store(out, tile + part + r, h, d, x[r]);
        }
      }
      mass[v] = running.mass;
#pragma unroll
      for (int i = 0; i < N; ++i) moment[column + i] = running.sum[i];
    });
    for (int r = 0; r < count; ++r) keys += enters_sums(key_mask, tile + r) > 0.0f;
  }

  if (alone && s.chunk == 0) clear_uncovered(p, access, f.out, f.membership, s);
  if (alone && !has_state) return;
  __syncthreads();  // all threads read the state before any thread replaces it
  float* const sums = alone ? nullptr : f.sums_2 + mine;
  each_vector<N>(p, [&](int v, int h, int d) {
    for (int i = 0; i < N; ++i) {
      const int column = h * p.head_dim + d + i;
      if (!alone) {
        sums[column] = moment[column];
        continue;
      }
      f.state_energy[channels + column] += energy[column];
      f.state_moment[channels + column] += moment[column];
    }
    if (d > 0) return;
    if (alone) {
      f.state_mass[heads + h] += mass[v];
    } else {
      sums[p.width + h] = mass[v];
    }
  });
  if (alone && threadIdx.x == 0) f.lengths[s.index] = keys;
}

}  // namespace crate_kernels
