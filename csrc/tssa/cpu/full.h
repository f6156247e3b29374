// The full form: three steps over the tokens; each needs the sums of the step before. A sequence that fits the
// second-level cache is read from memory once.
#pragma once

#include "tile.h"

namespace {
namespace tssa {

// Sums of each chunk by channel and by head, then the rows that every token needs; the last three in the backward only.
struct FullWork {
  float *parts, *masses, *inverse, *rest, *gate, *dmoment, *denergy, *dmass;

  FullWork(const TssaCpuProblem& p, const TssaSequence& s) {
    parts = s.work;
    masses = parts + s.chunks * p.row_size();
    inverse = masses + s.chunks * p.head_size();  // 1 / c; in the end of the backward 2 temp / c
    rest = inverse + p.row_size();                // of 1 / c
    gate = rest + p.row_size();                   // -A; in the backward A, dropout included
    dmoment = gate + p.row_size();                // dM, in the end 2 dM
    denergy = dmoment + p.row_size();             // sum_n dlogit w^2 / c: -c dc / temp
    dmass = denergy + p.row_size();
  }
  static int64_t size(const TssaCpuProblem& p, int64_t chunks) {
    return chunks * (p.row_size() + p.head_size()) + 5 * p.row_size() + p.head_size();
  }
  // By channel of head h.
  Reciprocals reciprocals(const TssaCpuProblem& p, int h) const {
    return {inverse + h * p.width(), rest + h * p.width()};
  }
  // Clears the sums of a chunk.
  void start(const TssaCpuProblem& p, int64_t chunk) const {
    memset(parts + chunk * p.row_size(), 0, p.row_size() * sizeof(float));
    memset(masses + chunk * p.head_size(), 0, p.head_size() * sizeof(float));
  }
};

void full_energy(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  sum_squares(p, s, chunk, memory, FullWork(p, s).parts + chunk * p.row_size());
}

void full_settle_energy(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float*) {
  const FullWork work(p, s);
  add_parts(work.parts, s.chunks, p.row_size(), work.inverse);
  for (int h = 0; h < p.nheads; ++h) {
    const Reciprocals row = work.reciprocals(p, h);
    memset(row.rest, 0, p.width() * sizeof(float));
    for (int d = 0; d < p.head_dim; ++d) {
      const float c = row.inverse[d] < kFullFloor ? kFullFloor : row.inverse[d];
      s.energy[h * p.head_dim + d] = c;
      row.set(d, c);
    }
  }
}

void full_members(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const FullWork work(p, s);
  float* const sums = work.parts + chunk * p.row_size();
  float* const masses = work.masses + chunk * p.head_size();
  work.start(p, chunk);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    with_tile(p, {s.w, {}, {}}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int h = 0; h < p.nheads; ++h) {
        const Vf q = ratio_dots(tile.w.of_head(h), vectors_of(p), work.reciprocals(p, h));
        store(staging.members + h * kLanes, q * p.temp[h]);
      }
      softmax_over_heads(p.nheads, has_key(s, first, count), staging.members);
      const Vf key_weight = key_weights(s, first, count);
      for (int h = 0; h < p.nheads; ++h) {
        float* const members = staging.members + h * kLanes;
        const Vf pi = load(members);
        store_some(s.membership.at(h, first), pi, count);
        store(members, pi * key_weight);
        masses[h] += sum(pi * key_weight);
        add_squares(tile.w.of_head(h), vectors_of(p), members, sums + h * p.width());
      }
    });
  });
}

void full_settle_moment(const TssaCpuProblem& p, const TssaSequence& s, int64_t, float* memory) {
  const FullWork work(p, s);
  float* const masses = memory;
  add_parts(work.parts, s.chunks, p.row_size(), work.gate);
  add_parts(work.masses, s.chunks, p.head_size(), masses);
  for (int h = 0; h < p.nheads; ++h) {
    float* const row = work.gate + h * p.width();
    const float mass = masses[h] + kMassFloor;
    for (int d = 0; d < p.head_dim; ++d) {
      const float moment = row[d] / mass;
      s.moment[h * p.head_dim + d] = moment;
      row[d] = -1.0f / (1.0f + moment);
    }
    if (!p.dropout) continue;
    float* const factor = memory + p.head_size();
    dropout_row(p, s.counter + h, 0, factor);
    for (int d = 0; d < p.head_dim; ++d) row[d] *= factor[d];
  }
}

void full_output(const TssaCpuProblem& p, const TssaSequence& s, int64_t chunk, float* memory) {
  const Staging staging(p, memory);
  const FullWork work(p, s);
  for_tiles(s, chunk, [&](int64_t first, int count) {
    load_members(p, s, first, count, Vf{}, staging.members, nullptr);
    // Token by token, in memory order: registers hold nothing between tokens.
    const int vectors = vectors_of(p), nheads = p.nheads;
    const int64_t width = p.width();
    with_tile(p, {s.w, {}, s.out}, first, count, staging, [&](const auto& tile) CRATE_LAMBDA {
      for (int n = 0; n < kLanes; ++n) {
        const float* gate = work.gate;
        for (int h = 0; h < nheads; ++h, gate += width) {
          const auto from = tile.w.at(h, n);
          const auto to = tile.out.at(h, n);
          const float pi = staging.members[h * kLanes + n];
          for_groups(vectors, [&](auto some, int v) CRATE_LAMBDA {
#pragma GCC unroll 4
            for (int i = v; i < v + decltype(some)::value; ++i) {
              write(to + i * kLanes, read(from + i * kLanes) * pi * load(gate + i * kLanes));
            }
          });
        }
      }
    });
  });
}

const TssaKernelStep kFullForward[] = {
    {full_energy, TssaKernelStep::chunks},  {full_settle_energy, TssaKernelStep::whole},
    {full_members, TssaKernelStep::chunks}, {full_settle_moment, TssaKernelStep::whole},
    {full_output, TssaKernelStep::chunks},
};

}  // namespace tssa
}  // namespace
