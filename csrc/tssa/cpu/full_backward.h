// The gradient of the full form: three steps over the tokens. The second needs no upstream gradient.
//
// q itself is never needed again: dtemp_h = sum_n dlogit q = sum_d (sum_n dlogit w^2 / c), and dc has the same inner
// sum.
#pragma once

#include "full.h"

namespace {
namespace tssa {

void full_prepare(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  const FullWork work(p, s);
  for (int h = 0; h < p.nheads; ++h) {
    float* const gate = work.gate + h * p.width();
    const Reciprocals row = work.reciprocals(p, h);
    for (int64_t d = 0; d < p.width(); ++d) gate[d] = 1.0f;
    if (p.dropout) dropout_row(p, s.counter + h, 0, gate);
    for (int d = 0; d < p.head_dim; ++d) {
      gate[d] /= 1.0f + s.moment[h * p.head_dim + d];
      row.set(d, s.energy[h * p.head_dim + d]);
    }
    for (int64_t d = p.head_dim; d < p.width(); ++d) row.inverse[d] = row.rest[d] = 0.0f;
  }
}

// sum_n Pi g w and sum_n Pi; sum_d g w A is stored in the place of dlogit.
void full_dgate(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const FullWork work(p, s);
  float* const sums = work.parts + chunk * p.row_size();
  float* const masses = work.masses + chunk * p.head_size();
  work.start(p, chunk);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    const Vf key_weight = key_weights(s, first, count);
    load_members(p, s, first, count, key_weight, staging.members, staging.counted);
    with_tile(p, {s.w, s.dout, {}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int h = 0; h < p.nheads; ++h) {
        const auto x = tile.w.of_head(h), g = tile.grad.of_head(h);
        const float* const members = staging.members + h * kLanes;
        masses[h] += sum(load(staging.counted + h * kLanes));
        Vf gated[kLanes] = {};
        for_groups(vectors_of(p), [&](auto some, int v) CRATE_LAMBDA {
          constexpr int kCount = decltype(some)::value;
          float* const total = sums + h * p.width() + v * kLanes;
          Vf acc[kCount], gate[kCount];
          load_group(total, acc);
          load_group(work.gate + h * p.width() + v * kLanes, gate);
          auto *x_token = at(x, 0, v), *g_token = at(g, 0, v);
#pragma GCC unroll 16
          for (int n = 0; n < kLanes; ++n, step(x, x_token), step(g, g_token)) {
#pragma GCC unroll 4
            for (int i = 0; i < kCount; ++i) {
              const Vf gx = read(g_token + i * kLanes) * read(x_token + i * kLanes);
              acc[i] += gx * members[n];
              gated[n] += gx * gate[i];
            }
          }
          store_group(total, acc);
        });
        store_some(s.dlogit.at(h, first), sum_each(gated), count);
      }
    });
  });
}

void full_settle_dmoment(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float* memory) {
  const FullWork work(p, s);
  float* const masses = memory;
  add_parts(work.parts, s.chunks, p.row_size(), work.dmoment);
  add_parts(work.masses, s.chunks, p.head_size(), masses);
  for (int h = 0; h < p.nheads; ++h) {
    float* const row = work.dmoment + h * p.width();
    const float mass = masses[h] + kMassFloor;
    float dmass = 0.0f;
    for (int d = 0; d < p.head_dim; ++d) {
      const float moment = s.moment[h * p.head_dim + d];
      // In this order: of tokens of 1e11, A^2 alone is below float's range.
      row[d] = row[d] * work.gate[h * p.width() + d] / (1.0f + moment) / mass;
      dmass -= row[d] * moment;
    }
    work.dmass[h] = dmass;
  }
}

void full_dlogit(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const FullWork work(p, s);
  float* const sums = work.parts + chunk * p.row_size();
  work.start(p, chunk);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    const Vf key_weight = key_weights(s, first, count);
    load_members(p, s, first, count, key_weight, staging.members, nullptr);
    with_tile(p, {s.w, {}, {}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int h = 0; h < p.nheads; ++h) {
        const Vf shared = square_dots(tile.w.of_head(h), vectors_of(p), work.dmoment + h * p.width()) + work.dmass[h];
        Vf dpi = shared * key_weight - load_some(s.dlogit.at(h, first), count);
        if (s.dmembership.data != nullptr) dpi += load_some(s.dmembership.at(h, first), count);
        store(staging.dots + h * kLanes, dpi);
      }
      softmax_backward(p.nheads, staging.members, staging.dots);
      for (int h = 0; h < p.nheads; ++h) {
        const float* const dlogit = staging.dots + h * kLanes;
        store_some(s.dlogit.at(h, first), load(dlogit), count);
        add_ratios(tile.w.of_head(h), vectors_of(p), work.reciprocals(p, h), dlogit, sums + h * p.width());
      }
    });
  });
}

void full_settle_denergy(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  const FullWork work(p, s);
  add_parts(work.parts, s.chunks, p.row_size(), work.denergy);
  for (int h = 0; h < p.nheads; ++h) {
    double dtemp = 0.0;
    for (int d = 0; d < p.head_dim; ++d) {
      float &denergy = work.denergy[h * p.width() + d], &inverse = work.inverse[h * p.width() + d];
      const float similarity = denergy;
      dtemp += similarity;
      const bool above = s.energy[h * p.head_dim + d] > kFullFloor;
      denergy = above ? similarity : 0.0f;
      inverse *= 2.0f * p.temp[h];
      work.dmoment[h * p.width() + d] *= 2.0f;
    }
    s.dtemp[h] = dtemp;
  }
}

void full_dw(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const FullWork work(p, s);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    alignas(64) float key_weight[kLanes], dlogit[kLanes];
    store(key_weight, key_weights(s, first, count));
    load_members(p, s, first, count, load(key_weight), staging.members, staging.counted);
    with_tile(p, {s.w, s.dout, s.dw}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int h = 0; h < p.nheads; ++h) {
        const auto x = tile.w.of_head(h), g = tile.grad.of_head(h), to = tile.out.of_head(h);
        const float* const members = staging.members + h * kLanes;
        const float* const counted = staging.counted + h * kLanes;
        store(dlogit, load_some(s.dlogit.at(h, first), count));
        for_groups(vectors_of(p), [&](auto some, int v) CRATE_LAMBDA {
          constexpr int kCount = decltype(some)::value;
          const int64_t row = h * p.width() + v * kLanes;
          Vf dmoment[kCount], inverse[kCount], denergy[kCount], gate[kCount];
          load_group(work.dmoment + row, dmoment);
          load_group(work.inverse + row, inverse);
          load_group(work.denergy + row, denergy);
          load_group(work.gate + row, gate);
          auto *x_token = at(x, 0, v), *g_token = at(g, 0, v), *token = at(to, 0, v);
          for (int n = 0; n < kLanes; ++n, step(x, x_token), step(g, g_token), step(to, token)) {
#pragma GCC unroll 4
            for (int i = 0; i < kCount; ++i) {
              // The difference first: where one token has most of c, it is small. Which product a sum is fused with
              // is stated, for compilers choose differently for tokens of different layouts.
              const Vf own = inverse[i] * (dlogit[n] - denergy[i] * key_weight[n]);
              const Vf slope = multiply_add(own, dmoment[i], splat(counted[n]));
              const Vf gated = read(g_token + i * kLanes) * gate[i] * members[n];
              write(token + i * kLanes, multiply_add(-gated, read(x_token + i * kLanes), slope));
            }
          }
        });
      }
    });
  });
}

const TssaKernelStep kFullBackward[] = {
    {full_prepare, TssaKernelStep::whole},        {full_dgate, TssaKernelStep::chunks},
    {full_settle_dmoment, TssaKernelStep::whole}, {full_dlogit, TssaKernelStep::chunks},
    {full_settle_denergy, TssaKernelStep::whole}, {full_dw, TssaKernelStep::chunks},
};

}  // namespace tssa
}  // namespace
