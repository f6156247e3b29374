// The steps of the causal backward, which causal_backward.cuh describes.
#pragma once

#include "causal_backward.cuh"

namespace crate_kernels {

// Sums of Pi w^2, of w^2 and of Pi.
template <class Access>
CRATE_DEVICE void causal_totals(const TssaBackSide<Access>& side, float* sums) {
  constexpr int N = Access::kCount;
  const TssaProblem& p = side.b.problem;
  each_vector<N>(p, [&](int, int h, int d) {
    TssaRunning<N> own = {};
#pragma unroll 4
    for (int n = 0; n < side.s.rows(); ++n) {
      float x[N];  // (N channels,) of a token
      side.access.load(side.w, n, h, d, x);
      own.add(x, side.members(n, h), enters_sums(side.key_mask, n));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[h * p.head_dim + d + i] = own.moment[i];
      sums[p.width + h * p.head_dim + d + i] = own.energy[i];
    }
    if (d == 0) sums[2 * p.width + h] = own.mass;
  });
}

// Sums of dM / s and of the terms of V.
template <class Access>
CRATE_DEVICE void causal_dmoment(const TssaBackSide<Access>& side, float* sums) {
  constexpr int N = Access::kCount;
  const TssaProblem& p = side.b.problem;
  float* const dmasses = reinterpret_cast<float*>(shared_memory());  // of every vector
  each_vector<N>(p, [&](int v, int h, int d) {
    const int column = h * p.head_dim + d;
    const float mass_before = side.masses[h] + kMassFloor;
    TssaRunning<N> own = {};
    float dmoment[N] = {}, dmass = 0.0f;  // (N channels,) per thread; of its head
    for (int tile = 0; tile < side.s.rows(); tile += kBackTile) {
      const uint32_t kept = side.kept(tile, kBackTile, h, d);
      float x[kBackTile][N], g[kBackTile][N];  // (kBackTile tokens, N channels) per thread
#pragma unroll
      for (int r = 0; r < kBackTile; ++r) side.load(tile + r, h, d, kept >> r * N, x[r], g[r]);
#pragma unroll
      for (int r = 0; r < kBackTile; ++r) {
        const float member = side.member(tile + r, h);
        own.add(x[r], member, side.counted(tile + r));
        float masses = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float moment = side.moments[column + i] + own.moment[i];
          const TssaThrough t = through_moment(x[r][i], g[r][i], member, moment, mass_before + own.mass);
          dmoment[i] += t.slope;
          masses += t.dmass;
        }
        dmass += masses / (mass_before + own.mass);
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sums[column + i] = dmoment[i];
    dmasses[v] = dmass;
  });
  __syncthreads();
  const int per_head = p.head_dim / N;
  for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) {
    float total = 0.0f;
    for (int v = 0; v < per_head; ++v) total += dmasses[h * per_head + v];
    sums[p.width + h] = total;
  }
}

// The gradient of the logits, and the sums of dc / temp and of dtemp. `sums` is null if a sequence is one chunk.
template <class Access>
CRATE_DEVICE void causal_dlogit(const TssaBackSide<Access>& side, float* sums, float* dtemps) {
  constexpr int N = Access::kCount;
  const TssaBackward& b = side.b;
  const TssaProblem& p = b.problem;
  const TssaCausalBackwardShared layout(p, N, true);
  const TssaMarks<Access> marks(side, layout);
  const int vectors = marks.vectors, per_head = p.head_dim / N, tile_pairs = kBackTile * p.nheads;
  float *const dmoment = shared_at<float>(layout.dmoment), *const denergy = shared_at<float>(layout.denergy),
               *const ratio = shared_at<float>(layout.ratio), *const partial = shared_at<float>(layout.partial),
               *const dmembers = shared_at<float>(layout.pairs), *const dmasses = dmembers + tile_pairs,
               *const similarity = dmasses + tile_pairs, *const gradient = similarity + tile_pairs,
               *const dmass = shared_at<float>(layout.dmass), *const dtemp = shared_at<float>(layout.dtemp);
  const TssaRows dlogit = rows_of(p, b.dlogit, side.s);
  const TssaRows dmembership = optional_rows_of(p, b.dmembership, side.s);

  each_vector<N>(p, [&](int v, int h, int d) {
    marks.mark(v, h, d);
    for (int i = 0; i < N; ++i) {
      dmoment[h * p.head_dim + d + i] = at_or_zero(side.dmoments, h * p.head_dim + d + i);
      denergy[h * p.head_dim + d + i] = 0.0f;
    }
  });
  for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) {
    dmass[h] = at_or_zero(side.dmasses, h);
    dtemp[h] = 0.0f;
  }
  const int tiles = (side.s.rows() + kBackTile - 1) / kBackTile;
  for (int tile = (tiles - 1) * kBackTile; tile >= 0; tile -= kBackTile) {
    const int count = min(side.s.rows() - tile, kBackTile);
    each_vector<N>(p, [&](int v, int h, int d) {
      const int column = h * p.head_dim + d;
      const TssaBackTokens<Access> t(side, marks, tile, v, h, d);
      float later[N];  // (N channels,) per thread: dM of the tokens behind
#pragma unroll
      for (int i = 0; i < N; ++i) later[i] = dmoment[column + i];
#pragma unroll
      for (int r = kBackTile - 1; r >= 0; --r) {
        const float member = side.member(tile + r, h);
        float shared = 0.0f, gated = 0.0f, masses = 0.0f, ratios = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const TssaThrough through = through_moment(t.x[r][i], t.g[r][i], member, t.moment[r][i], t.mass[r]);
          const float square = t.x[r][i] * t.x[r][i];
          const float energy = floored(t.energy[r][i], kCausalFloor), inverse = 1.0f / energy;
          const float own = square * inverse;
          later[i] += through.slope;
          shared += later[i] * square;
          gated += through.gate * t.x[r][i];
          masses += through.dmass;
          // What own has rounded: of a first token it is exactly 1.
          ratios += fmaf(fmaf(-own, fminf(energy, FLT_MAX), square), inverse, own);
          ratio[r * p.width + column + i] = t.energy[r][i] > kCausalFloor ? own * inverse : 0.0f;
        }
        partial[r * vectors + v] = shared * side.counted(tile + r) - gated;
        partial[(kBackTile + r) * vectors + v] = masses / t.mass[r];
        partial[(2 * kBackTile + r) * vectors + v] = ratios;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) dmoment[column + i] = later[i];
    });
    __syncthreads();
    for (int pair = threadIdx.x; pair < 3 * count * p.nheads; pair += blockDim.x) {
      const int which = pair / (count * p.nheads), rest = pair - which * count * p.nheads;
      const int r = rest / p.nheads, h = rest - r * p.nheads;
      float total = 0.0f;
      for (int v = 0; v < per_head; ++v) total += partial[(which * kBackTile + r) * vectors + h * per_head + v];
      if (which == 2 && b.bias != nullptr) {
        // Rounded once: a bias may take back nearly all of the ratios.
        const int64_t place = min(int64_t{side.s.first} + tile + r, b.bias_tokens - 1);
        total = fmaf(static_cast<float>(p.head_dim), b.bias[h * b.bias_tokens + place], total);
      }
      dmembers[which * tile_pairs + rest] = total;
    }
    __syncthreads();
    for (int r = threadIdx.x / kWarp; r < count; r += blockDim.x / kWarp) {
      for (int h = threadIdx.x % kWarp; h < p.nheads; h += kWarp) {
        float through_mass = dmass[h];
        for (int later = count - 1; later >= r; --later) through_mass += dmasses[later * p.nheads + h];
        dmembers[r * p.nheads + h] += through_mass * enters_sums(side.key_mask, tile + r);
        if (dmembership.data != nullptr) dmembers[r * p.nheads + h] += dmembership(tile + r, h);
      }
      softmax_backward(p, dmembers + r * p.nheads, side.members, dlogit, tile + r,
                       [&](int h, float value) { gradient[r * p.nheads + h] = value; });
    }
    __syncthreads();
    each_vector<N>(p, [&](int, int h, int d) {
      for (int r = count - 1; r >= 0; --r) {
        for (int i = 0; i < N; ++i) {
          const int column = h * p.head_dim + d + i;
          denergy[column] += gradient[r * p.nheads + h] * ratio[r * p.width + column];
        }
      }
    });
    for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) {
      for (int r = count - 1; r >= 0; --r) {
        dtemp[h] += gradient[r * p.nheads + h] * similarity[r * p.nheads + h];
        dmass[h] += dmasses[r * p.nheads + h];
      }
    }
  }
  if (sums != nullptr) {
    each_vector<N>(p, [&](int, int h, int d) {
      for (int i = 0; i < N; ++i) sums[h * p.head_dim + d + i] = denergy[h * p.head_dim + d + i];
    });
  }
  for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) dtemps[h] = dtemp[h];
}

// dw: each thread goes through the chunk alone, from the last token.
template <class Access>
CRATE_DEVICE void causal_dw(const TssaBackSide<Access>& side) {
  constexpr int N = Access::kCount;
  const TssaProblem& p = side.b.problem;
  const TssaMarks<Access> marks(side, TssaCausalBackwardShared(p, N, false));
  const TssaRows dlogit = rows_of(p, side.b.dlogit, side.s);
  const TssaTokens dw = part_of(p, side.b.dw, side.s);
  each_vector<N>(p, [&](int v, int h, int d) {
    const int column = h * p.head_dim + d;
    const float temp = p.temp[h];
    marks.mark(v, h, d);
    float dmoment[N], denergy[N];  // (N channels,) per thread, of the tokens behind
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dmoment[i] = at_or_zero(side.dmoments, column + i);
      denergy[i] = at_or_zero(side.denergies, column + i);
    }
    const int tiles = (side.s.rows() + kBackTile - 1) / kBackTile;
    for (int tile = (tiles - 1) * kBackTile; tile >= 0; tile -= kBackTile) {
      TssaBackTokens<Access> t(side, marks, tile, v, h, d);
#pragma unroll
      for (int r = kBackTile - 1; r >= 0; --r) {
        const int n = tile + r;
        if (n >= side.s.rows()) continue;
        const float member = side.members(n, h), counted = enters_sums(side.key_mask, n), gradient = dlogit(n, h);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float x = t.x[r][i], square = x * x, inverse = 1.0f / floored(t.energy[r][i], kCausalFloor);
          const TssaThrough through = through_moment(x, t.g[r][i], member, t.moment[r][i], t.mass[r]);
          const bool above = t.energy[r][i] > kCausalFloor;
          const float slope = gradient * inverse;
          dmoment[i] += through.slope;
          // The later sums leave out the token itself. Its own part, 1 / c - w^2 / c^2, is one term, so that it cancels
          // exactly for a first token.
          const float own = slope * (above ? (t.energy[r][i] - square * counted) * inverse : 1.0f);
          const float by_energy = temp * (own - denergy[i] * counted);
          denergy[i] += above ? slope * square * inverse : 0.0f;
          t.x[r][i] = 2.0f * x * (by_energy + dmoment[i] * (member * counted)) - through.gate * member;
        }
        side.access.store(dw, n, h, d, t.x[r]);
      }
    }
  });
  if (side.s.chunk == 0) clear_uncovered(p, side.access, side.b.dw, nullptr, side.s);
}

template <class Access, TssaCausalBackwardStep step>
__global__ void __launch_bounds__(256, 1) tssa_causal_bwd_kernel(TssaBackward b, Access access) {
  const TssaProblem& p = b.problem;
  const TssaBackSide<Access> side(b, access);
  const int64_t chunk = static_cast<int64_t>(side.s.index) * (p.nchunks + 1) + side.s.chunk, size = p.width + p.nheads;
  if constexpr (step == TssaCausalBackwardStep::totals) {
    causal_totals(side, b.sums_1 + chunk * (size + p.width));
  } else if constexpr (step == TssaCausalBackwardStep::dmoment) {
    causal_dmoment(side, b.sums_2 + chunk * size);
  } else if constexpr (step == TssaCausalBackwardStep::dlogit) {
    float* const sums = b.sums_3 == nullptr ? nullptr : b.sums_3 + chunk * size;
    causal_dlogit(side, sums, sums == nullptr ? b.dtemp + int64_t{side.s.index} * p.nheads : sums + p.width);
  } else {
    causal_dw(side);
  }
}

}  // namespace crate_kernels
