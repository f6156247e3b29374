// The gradient of the causal form: two scans from the last token to the first. The running sums are computed again, not
// stored.
//
// The totals of every chunk are kept, and those of the tiles of the current chunk. Threads that share a sequence first
// compute the chunks' totals of each scan.
#pragma once

#include "causal.h"

namespace {
namespace tssa {

// The sums of chunks `chunk` and later.
CRATE_INLINE CausalSums from_chunk(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk) {
  return CausalSums(p, s.work + (s.chunks + 3 + chunk) * CausalSums::size(p));
}
CRATE_INLINE double* dtemp_of_chunk(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk) {
  return reinterpret_cast<double*>(s.work + (2 * s.chunks + 4) * CausalSums::size(p)) + chunk * p.head_size();
}
int64_t causal_backward_work_size(const TssaCpuProblem& p, int64_t chunks) {
  return (2 * chunks + 4) * CausalSums::size(p) + 2 * chunks * p.head_size();
}

// Goes through a chunk's running sums and calls visit(number) before each tile.
template <class Visit>
CRATE_INLINE void sum_forward(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, const Staging& staging,
                              const CausalSums& sums, const Visit& visit) {
  sums.clear(p);
  int number = 0;
  for_tiles(s, chunk, [&](int64_t first, int count) {
    visit(number++);
    alignas(64) float key_weight[kLanes];
    store(key_weight, key_weights(s, first, count));
    load_members(p, s, first, count, load(key_weight), staging.members, staging.counted);
    with_tile(p, {s.w, {}, {}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int h = 0; h < p.nheads; ++h) {
        float* const counted = staging.counted + h * kLanes;
        for (int n = 0; n < kLanes; ++n) sums.mass[h] += counted[n];
        add_squares(tile.w.of_head(h), vectors_of(p), key_weight, sums.energy + h * p.width());
        add_squares(tile.w.of_head(h), vectors_of(p), counted, sums.moment + h * p.width());
      }
    });
  });
}

void causal_totals(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  sum_forward(p, s, chunk, Staging(p, memory), before_chunk(p, s, chunk + 1), [](int) {});
}

void causal_settle_totals(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  causal_state<true>(p, s, 0, nullptr);
  causal_settle<SumsRange::energy>(p, s, 0, nullptr);
  causal_settle<SumsRange::moment>(p, s, 0, nullptr);
  from_chunk(p, s, s.chunks).clear(p);
  memset(totals(s), 0, CausalSums::size(p) * sizeof(double));
}

// One head of a tile, scalars by token. `partial` holds the terms of dw in fp32 until their sum is rounded to dw.
template <class T>
struct TileHead {
  TssaCpuTensor<T> w, grad, dw;
  Floats partial, factor;
  int vectors;
  const float *key_weight, *members, *counted, *masses, *inverse_masses;
};
template <class T>
TileHead(TssaCpuTensor<T>, TssaCpuTensor<T>, TssaCpuTensor<T>, Floats, Floats, int, const float*, const float*,
         const float*, const float*, const float*) -> TileHead<T>;

// fp32 tensors hold these terms themselves.
CRATE_INLINE Floats place_partial(const Floats& dw, const Floats&) {
  return dw;
}
CRATE_INLINE Floats place_partial(const Halves&, const Floats& staging) {
  return staging;
}

// Lane n: dPi without the part of later tiles in V. Stores all terms of dw that need no dlogit. `dmoment` is carried
// on.
template <bool kDropout, bool kWrite, class T>
CRATE_INLINE Vf scan_dmoment(const TileHead<T>& t, const float* before, const float* at_tile, const float* after,
                             float* dmoment, float& v_sum) {
  Vf acc[kLanes] = {}, v_total = {};
  for (int v = 0; v < t.vectors; ++v) {
    const Vf base = load(before + v * kLanes), later = load(after + v * kLanes);
    Vf run = load(at_tile + v * kLanes), total[kLanes];
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      const Vf x = get(t.w, n, v);
      run += x * x * t.counted[n];
      total[n] = base + run;
    }
    Vf suffix = load(dmoment + v * kLanes), v_suffix = {};
#pragma GCC unroll 16
    for (int n = kLanes - 1; n >= 0; --n) {
      const Vf x = get(t.w, n, v);
      Vf g = get(t.grad, n, v);
      if (kDropout) g *= get(t.factor, n, v);
      const Vf inverse = 1.0f / (total[n] + t.masses[n]);
      const Vf gate = g * inverse * t.masses[n];           // g A
      const Vf slope = gate * x * inverse * t.members[n];  // dM / s
      suffix += slope;
      v_suffix -= slope * total[n] * t.inverse_masses[n];
      const Vf u = later + suffix;
      acc[n] += (u * x * x + v_suffix) * t.key_weight[n] - gate * x;
      if (kWrite) put(t.partial, n, v, u * x * (2.0f * t.counted[n]) - gate * t.members[n]);
    }
    store(dmoment + v * kLanes, suffix);
    v_total += v_suffix;
  }
  v_sum = sum(v_total);
  return sum_each(acc);
}

// The gradient of c is of the size of dout / w^3: of tokens of 1e15 it would be subnormal. It is carried times this
// power of two.
constexpr float kLift = 0x1p48f, kLower = 0x1p-48f;

// Adds the gradient through c, which completes dw; `dlogit` is times kLift. Returns this tile's sum of dlogit q,
// without the bias.
template <bool kWrite, class T>
CRATE_INLINE float scan_denergy(const TileHead<T>& t, float temp, const float* dlogit, const float* before,
                                const float* at_tile, const float* after, float* denergy) {
  Vf dtemp = {};
  const float twice = 2.0f * kLower * temp;
  for (int v = 0; v < t.vectors; ++v) {
    const Vf base = load(before + v * kLanes), later = kWrite ? load(after + v * kLanes) : Vf{};
    Vf run = load(at_tile + v * kLanes), energy[kLanes + 1];
    energy[0] = base + run;
#pragma GCC unroll 16
    for (int n = 0; n < kLanes; ++n) {
      const Vf x = get(t.w, n, v);
      run += x * x * t.key_weight[n];
      energy[n + 1] = base + run;
    }
    Vf suffix = load(denergy + v * kLanes);
#pragma GCC unroll 16
    for (int n = kLanes - 1; n >= 0; --n) {
      const Vf x = get(t.w, n, v);
      const Vf inverse = 1.0f / max(splat(kCausalFloor), energy[n + 1]);
      const Vi above = energy[n + 1] > kCausalFloor;
      const Vf per_energy = inverse * dlogit[n];
      const Vf similarity = per_energy * x * x;
      dtemp += similarity;
      // A token's own part, 1 / c - w^2 / c^2, equals the sum before it divided by c^2: this form has no cancellation.
      const Vf own = per_energy * select(above, energy[n] * inverse, splat(1.0f));
      if (kWrite) put(t.dw, n, v, get(t.partial, n, v) + x * twice * (own - (later + suffix) * t.key_weight[n]));
      suffix += select(above, similarity * inverse, Vf{});
    }
    store(denergy + v * kLanes, suffix);
  }
  return kLower * sum(dtemp);
}

// Whether a channel of a head has no key before the tile, whose first w^2 / c is then exactly 1.
CRATE_INLINE bool channel_begins(const TssaCpuProblem& p, const float* before, const float* at_tile) {
  Vf begins = {};
  for (int64_t d = 0; d < p.head_dim; d += kLanes) {
    const Vi exists = iota() < static_cast<int32_t>(p.head_dim - d);
    begins = max(begins, select(exists & (load(before + d) + load(at_tile + d) == 0.0f), splat(1.0f), Vf{}));
  }
  return max(begins) > 0.0f;
}

// Results of a pass over a chunk: the totals of one scan, for other passes to sum; both scans carried on; or dw alone.
enum class PassResult { dmoment, denergy, carried, nothing };

template <PassResult kResult>
void causal_backward_chunk(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  constexpr bool kWrite = kResult == PassResult::carried || kResult == PassResult::nothing;
  const Staging staging(p, memory);
  const int64_t sums_size = CausalSums::size(p);
  float* const tile_sums = staging.causal;
  float* next = tile_sums + kTilesPerChunk * sums_size;
  const CausalSums running(p, next), local(p, next + sums_size);
  next += 2 * sums_size;
  const Floats factor = {next, 0, p.width(), 1}, copied = tile_at(p, staging.out);
  // Other threads write the later chunks' sums of moments in the pass that leaves them: it does without, as the last
  // chunk does.
  const CausalSums before = before_chunk(p, s, chunk);
  const CausalSums after = from_chunk(p, s, kResult == PassResult::dmoment ? s.chunks : chunk + 1);
  double* const dtemp = dtemp_of_chunk(p, s, chunk);
  sum_forward(p, s, chunk, staging, running,
              [&](int tile) { memcpy(tile_sums + tile * sums_size, running.energy, sums_size * sizeof(float)); });
  local.clear(p);
  memset(dtemp, 0, p.head_size() * sizeof(double));

  const int64_t begin = chunk * kTssaChunk, left = s.seqlen - begin;
  for (int64_t tile = ((left < kTssaChunk ? left : kTssaChunk) - 1) / kLanes; tile >= 0; --tile) {
    const int64_t first = begin + tile * kLanes;
    const int count = static_cast<int>(s.seqlen - first < kLanes ? s.seqlen - first : kLanes);
    const CausalSums at_tile(p, tile_sums + tile * sums_size);
    alignas(64) float key_weight[kLanes], masses[kLanes], inverse_masses[kLanes], lifted[kLanes];
    store(key_weight, key_weights(s, first, count));
    load_members(p, s, first, count, load(key_weight), staging.members, staging.counted);
    with_tile(p, {s.w, s.dout, kWrite ? s.dw : Tokens{}}, first, count, staging, [&](const auto& tokens) CRATE_LAMBDA {
      const Floats partial = place_partial(tokens.out, copied);
      const auto head = [&](int h) CRATE_LAMBDA {
        return TileHead{tokens.w.of_head(h),
                        tokens.grad.of_head(h),
                        tokens.out.of_head(h),
                        partial.of_head(h),
                        factor,
                        vectors_of(p),
                        key_weight,
                        staging.members + h * kLanes,
                        staging.counted + h * kLanes,
                        masses,
                        inverse_masses};
      };
      for (int h = 0; h < p.nheads; ++h) {
        const int64_t row = h * p.width();
        const auto t = head(h);
        float mass = at_tile.mass[h], v_sum;
        running_mass(before.mass[h], t.counted, mass, masses);
        store(inverse_masses, 1.0f / load(masses));
        if (p.dropout) dropout_rows(p, s.counter + h, first, factor);
        const auto scan = [&](auto dropout) CRATE_LAMBDA {
          return scan_dmoment<decltype(dropout)::value, kWrite>(t, before.moment + row, at_tile.moment + row,
                                                                after.moment + row, local.moment + row, v_sum);
        };
        Vf dpi = p.dropout ? scan(std::true_type{}) : scan(std::false_type{});
        dpi += (after.mass[h] + local.mass[h]) * load(key_weight);
        local.mass[h] += v_sum;
        if (s.dmembership.data != nullptr) dpi += load_some(s.dmembership.at(h, first), count);
        store(staging.dots + h * kLanes, dpi);
      }
      if (kResult == PassResult::dmoment) return;
      softmax_backward(p.nheads, staging.members, staging.dots);
      for (int h = 0; h < p.nheads; ++h) {
        const int64_t row = h * p.width();
        const float* const dlogit = staging.dots + h * kLanes;
        store_some(s.dlogit.at(h, first), load(dlogit), count);
        const auto t = head(h);
        store(lifted, kLift * load(dlogit));
        const float ratios = scan_denergy<kWrite>(t, p.temp[h], lifted, before.energy + row, at_tile.energy + row,
                                                  after.energy + row, local.energy + row);
        if (s.bias == nullptr) {
          dtemp[h] += ratios;
          continue;
        }
        // A bias may take back nearly all of a ratio that is 1: q is then summed by itself, from exact ratios. Terms of
        // a bias that grows are far larger than their sum.
        Vf q = {};
        const bool begins = channel_begins(p, before.energy + row, at_tile.energy + row);
        if (begins)
          q = running_dots(t.w, t.vectors, key_weight, before.energy + row, at_tile.energy + row);
        else
          dtemp[h] += ratios;
        const Vf bias = load_bias(s, h, first, count);
        for (int n = 0; n < count; ++n) dtemp[h] += dlogit[n] * (q[n] + static_cast<double>(p.head_dim) * bias[n]);
      }
    });
  }

  const CausalSums from = from_chunk(p, s, chunk);
  if (kResult == PassResult::carried) add_to_totals(totals(s), local.energy, sums_size, from.energy);
  if (kResult == PassResult::denergy) memcpy(from.energy, local.energy, p.row_size() * sizeof(float));
  if (kResult == PassResult::dmoment)
    memcpy(from.moment, local.moment, range_size(p, SumsRange::moment) * sizeof(float));
}

// Adds to each chunk's sums those of the chunks behind it.
template <SumsRange range>
void causal_settle_back(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  const int64_t start = range_start(p, range);
  for (int64_t chunk = s.chunks - 1; chunk >= 0; --chunk) {
    float* const from = from_chunk(p, s, chunk).energy + start;
    add_to_totals(totals(s) + start, from, range_size(p, range), from);
  }
}

void causal_settle_dtemp(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  for (int h = 0; h < p.nheads; ++h) {
    double total = 0.0;
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk) total += dtemp_of_chunk(p, s, chunk)[h];
    s.dtemp[h] = total;
  }
}

const TssaKernelStep kCausalBackwardAlone[] = {
    {causal_totals, TssaKernelStep::chunks},
    {causal_settle_totals, TssaKernelStep::whole},
    {causal_backward_chunk<PassResult::carried>, TssaKernelStep::descending},
    {causal_settle_dtemp, TssaKernelStep::whole},
};
const TssaKernelStep kCausalBackwardShared[] = {
    {causal_totals, TssaKernelStep::chunks},
    {causal_settle_totals, TssaKernelStep::whole},
    {causal_backward_chunk<PassResult::dmoment>, TssaKernelStep::chunks},
    {causal_settle_back<SumsRange::moment>, TssaKernelStep::whole},
    {causal_backward_chunk<PassResult::denergy>, TssaKernelStep::chunks},
    {causal_settle_back<SumsRange::energy>, TssaKernelStep::whole},
    {causal_backward_chunk<PassResult::nothing>, TssaKernelStep::chunks},
    {causal_settle_dtemp, TssaKernelStep::whole},
};

}  // namespace tssa
}  // namespace
