// The causal form: running sums, so that one thread reads the tokens once.
//
// A running sum is the total of the chunks before, plus a sum that starts with the chunk. Totals are added up in fp64:
// in fp32, what each of thousands of chunks rounds off would be more than eager form's whole error. Threads that share
// a sequence first sum its chunks. Their results have the same bits as those of one thread.
#pragma once

#include "tile.h"

namespace {
namespace tssa {

// Sums over tokens: of w^2, of Pi w^2, and of Pi. In the gradient: of dM / s, of dc / temp, and V of docs/tssa.md.
struct CausalSums {
  float *energy, *moment, *mass;

  CausalSums(const TssaCpuProblem& p, float* memory)
      : energy(memory), moment(memory + p.row_size()), mass(memory + 2 * p.row_size()) {}
  static int64_t size(const TssaCpuProblem& p) { return 2 * p.row_size() + p.head_size(); }
  void clear(const TssaCpuProblem& p) const { memset(energy, 0, size(p) * sizeof(float)); }
};

// The totals of a scan over chunks so far, in the order of CausalSums. The first two slots of `work` hold them.
CRATE_INLINE double* totals(const TssaSequence& s) {
  return reinterpret_cast<double*>(s.work);
}
// The sums of the chunks before `chunk`. The next slot holds the totals of `chunk` itself until they are summed.
CRATE_INLINE CausalSums before_chunk(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk) {
  return CausalSums(p, s.work + (chunk + 2) * CausalSums::size(p));
}
int64_t causal_work_size(const TssaCpuProblem& p, int64_t chunks) {
  return (chunks + 3) * CausalSums::size(p);
}

// Adds a chunk's sums to the totals and stores these, rounded, to `sums`, which may be `chunk`.
CRATE_INLINE void add_to_totals(double* total, const float* chunk, int64_t size, float* sums) {
  for (int64_t i = 0; i < size; ++i) {
    total[i] += chunk[i];
    sums[i] = static_cast<float>(total[i]);
  }
}

// masses[n] = before + the running sum of counted, carried on in `local`.
CRATE_INLINE void running_mass(float before, const float* counted, float& local, float* masses) {
  float total = local;
  for (int n = 0; n < kLanes; ++n) {
    total += counted[n];
    masses[n] = before + total + kMassFloor;
  }
  local = total;
}

// denom_bias of a tile's tokens. Only padded tokens, whose output is not read, are past its end.
CRATE_INLINE Vf load_bias(const TssaSequence& s, int h, int64_t first, int count) {
  const float* const row = s.bias + h * s.bias_tokens;
  const int64_t start = s.position + first;
  if (start + count <= s.bias_tokens) return load_some(row + start, count);
  Vf bias = {};
  for (int n = 0; n < count; ++n) bias[n] = row[start + n < s.bias_tokens ? start + n : s.bias_tokens - 1];
  return bias;
}

// Lane n: sum_d w_nd^2 / c_nd.
template <class T>
CRATE_INLINE Vf running_dots(const TssaCpuTensor<T>& w, int vectors, const float* key_weight, const float* before,
                             float* local) {
  Vf acc[kLanes] = {};
  for (int v = 0; v < vectors; ++v) {
    const Vf base = load(before + v * kLanes);
    Vf run = load(local + v * kLanes);
    T* token = at(w, 0, v);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n, step(w, token)) {
      const Vf x = read(token);
      const Vf square = x * x;
      run += square * key_weight[n];
      acc[n] += square / max(splat(kCausalFloor), base + run);
    }
    store(local + v * kLanes, run);
  }
  return sum_each(acc);
}

// out = -w Pi / (1 + M), with 1 / (1 + M) = s / (s + sum Pi w^2); `scale` is -Pi s.
template <bool kDropout, class T>
CRATE_INLINE void running_output(const TssaCpuTensor<T>& w, int vectors, const float* counted, const float* masses,
                                 const float* scale, const Floats& factor, const float* before, float* local,
                                 const TssaCpuTensor<T>& out) {
  for (int v = 0; v < vectors; ++v) {
    const Vf base = load(before + v * kLanes);
    Vf run = load(local + v * kLanes);
    T *token = at(w, 0, v), *to = at(out, 0, v);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n, step(w, token), step(out, to)) {
      const Vf x = read(token);
      run += x * x * counted[n];
      Vf y = x * scale[n] / (base + run + masses[n]);
      if (kDropout) y *= get(factor, n, v);
      write(to, y);
    }
    store(local + v * kLanes, run);
  }
}

// Starts the totals with a sequence's state of decoding, if any, or copies those of all chunks to it.
template <bool kBegin>
void causal_state(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  double *const energy = totals(s), *const moment = energy + p.row_size(), *const mass = moment + p.row_size();
  if (kBegin) memset(energy, 0, CausalSums::size(p) * sizeof(double));
  if (s.state_mass != nullptr) {
    const auto copy = [](double* state, double* total, int64_t count) {
      memcpy(kBegin ? total : state, kBegin ? state : total, count * sizeof(double));
    };
    for (int h = 0; h < p.nheads; ++h) {
      copy(s.state_energy + h * p.head_dim, energy + h * p.width(), p.head_dim);
      copy(s.state_moment + h * p.head_dim, moment + h * p.width(), p.head_dim);
    }
    copy(s.state_mass, mass, p.nheads);
  }
  float* const first = before_chunk(p, s, 0).energy;
  for (int64_t i = 0; kBegin && i < CausalSums::size(p); ++i) first[i] = static_cast<float>(energy[i]);
}

void causal_energy(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  sum_squares(p, s, chunk, memory, before_chunk(p, s, chunk + 1).energy);
}

// Some of a chunk's sums: one row per head, or the second row and the number behind it.
enum class SumsRange { energy, moment };

CRATE_INLINE int64_t range_start(const TssaCpuProblem& p, SumsRange range) {
  return range == SumsRange::energy ? 0 : p.row_size();
}
CRATE_INLINE int64_t range_size(const TssaCpuProblem& p, SumsRange range) {
  return p.row_size() + (range == SumsRange::energy ? 0 : p.head_size());
}

// Adds to each chunk's sums those of the chunks before it.
template <SumsRange range>
void causal_settle(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  const int64_t start = range_start(p, range);
  for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
    float* const next = before_chunk(p, s, chunk + 1).energy + start;
    add_to_totals(totals(s) + start, next, range_size(p, range), next);
  }
}

// Computes the membership of a chunk, its output, or both.
template <bool kMembers, bool kOutput>
void causal_chunk(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const CausalSums before = before_chunk(p, s, chunk), local(p, staging.causal);
  const Floats factor = {staging.causal + CausalSums::size(p), 0, p.width(), 1};
  local.clear(p);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    const int vectors = vectors_of(p);
    alignas(64) float key_weight[kLanes], masses[kLanes], scale[kLanes];
    store(key_weight, key_weights(s, first, count));
    with_tile(p, {s.w, {}, kOutput ? s.out : Tokens{}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      if (kMembers) {
        for (int h = 0; h < p.nheads; ++h) {
          const int64_t row = h * p.width();
          Vf q = running_dots(tile.w.of_head(h), vectors, key_weight, before.energy + row, local.energy + row);
          if (s.bias != nullptr) q += load_bias(s, h, first, count) * static_cast<float>(p.head_dim);
          store(staging.members + h * kLanes, q * p.temp[h]);
        }
        softmax_over_heads(p.nheads, has_key(s, first, count), staging.members);
        for (int h = 0; h < p.nheads; ++h) {
          const Vf pi = load(staging.members + h * kLanes);
          store_some(s.membership.at(h, first), pi, count);
          store(staging.counted + h * kLanes, pi * load(key_weight));
        }
      } else {
        load_members(p, s, first, count, load(key_weight), staging.members, staging.counted);
      }
      for (int h = 0; h < p.nheads; ++h) {
        const int64_t row = h * p.width();
        const float* const counted = staging.counted + h * kLanes;
        // Without output, other threads write the masses before this chunk, and `masses` is not used.
        running_mass(kOutput ? before.mass[h] : 0.0f, counted, local.mass[h], masses);
        if (!kOutput) {
          add_squares(tile.w.of_head(h), vectors, counted, local.moment + row);
          continue;
        }
        store(scale, -load(staging.members + h * kLanes) * load(masses));
        if (p.dropout) dropout_rows(p, s.counter + h, first, factor);
        const auto output = [&](auto dropout) {
          running_output<decltype(dropout)::value>(tile.w.of_head(h), vectors, counted, masses, scale, factor,
                                                   before.moment + row, local.moment + row, tile.out.of_head(h));
        };
        p.dropout ? output(std::true_type{}) : output(std::false_type{});
      }
    });
  });
  const CausalSums after = before_chunk(p, s, chunk + 1);
  if (kMembers && kOutput) add_to_totals(totals(s), local.energy, CausalSums::size(p), after.energy);
  if (kMembers && !kOutput) memcpy(after.moment, local.moment, range_size(p, SumsRange::moment) * sizeof(float));
}

const TssaKernelStep kCausalForwardAlone[] = {
    {causal_state<true>, TssaKernelStep::whole},
    {causal_chunk<true, true>, TssaKernelStep::ascending},
    {causal_state<false>, TssaKernelStep::whole},
};
const TssaKernelStep kCausalForwardShared[] = {
    {causal_state<true>, TssaKernelStep::whole},
    {causal_energy, TssaKernelStep::chunks},
    {causal_settle<SumsRange::energy>, TssaKernelStep::whole},
    {causal_chunk<true, false>, TssaKernelStep::chunks},
    {causal_settle<SumsRange::moment>, TssaKernelStep::whole},
    {causal_chunk<false, true>, TssaKernelStep::chunks},
    {causal_state<false>, TssaKernelStep::whole},
};

}  // namespace tssa
}  // namespace
