// persistent.cuh, backward: reads w and dout once and writes dw once, in one launch. docs/tssa.md has the equations.
#pragma once

#include "full_backward_steps.cuh"
#include "persistent_steps.cuh"

namespace crate_kernels {

// As TssaFetch, of all that the backward reads: energies and moments by bulk copies too, and the membership number by
// number, as a token's stand apart.
template <class S>
struct TssaBackwardFetch {
  using Shared = TssaPersistentShared<S, true>;
  const TssaBackward& b;
  TssaLayout<S> w_layout, dout_layout;
  uint32_t base;  // of shared memory
  Shared at;

  CRATE_DEVICE uint32_t tokens(int buffer, int copy) const {
    return base + 4 * (Shared::kTokens + (2 * buffer + copy) * at.size);
  }
  CRATE_DEVICE uint32_t barrier(int buffer) const { return base + 8 * buffer; }

  CRATE_DEVICE void operator()(int index, int buffer) const {
    constexpr int kBytes = 4 * S::kWidth;
    if (index < b.problem.nsequences) {
      const TssaSpan s = span_of<S>(b.problem, index);
      const int rows = s.rows();
      if (threadIdx.x == 0) {
        const int64_t columns = static_cast<int64_t>(index) * S::kWidth;
        const uint32_t to = base + 4 * Shared::kStatistics + 2 * buffer * kBytes;
        mbarrier_expect(barrier(buffer), rows * kBytes + 2 * kBytes);
        bulk_load(to, b.energy + columns, kBytes, barrier(buffer));
        bulk_load(to + kBytes, b.moment + columns, kBytes, barrier(buffer));
      }
      bulk_tokens<S>(b.problem, b.w, s, w_layout, tokens(buffer, 0), barrier(buffer));
      bulk_tokens<S>(b.problem, b.dout, s, dout_layout, tokens(buffer, 1), barrier(buffer));
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

// Puts the gradient of a token's logits down in the place of the sums of g w A; `moments` has those of w^2 dM by
// vector.
template <class S>
CRATE_DEVICE void softmax_backward_of_heads(const float* moments, const float* dmass, const float* members,
                                            float counted, const TssaRows& dmembership, int n, int first, bool own,
                                            float* dlogit) {
  constexpr int kOfLane = S::kOfLane;
  float d[kOfLane];  // (kOfLane heads,) of a token
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const int h = first + j;
    d[j] = (sum_of<S::kPerHead>(moments + h * S::kPerHead) + dmass[h]) * counted - dlogit[n * S::kHeads + h];
    if (dmembership.data != nullptr) d[j] += dmembership(n, h);
  }
  through_softmax<S>(d, members, n, first, own, dlogit);
}

template <class T, int HEADS, int HEAD_DIM, int CLUSTER, int THREADS, int BUFFERS, bool MASKED, int TOGETHER>
__global__ void __launch_bounds__(THREADS, TOGETHER > 1 ? 1 : 768 / THREADS)
    tssa_full_bwd_persistent_kernel(TssaBackward b) {
  using S = TssaSizes<T, HEADS, HEAD_DIM, CLUSTER, THREADS, BUFFERS, MASKED, TOGETHER>;
  using Shared = TssaPersistentShared<S, true>;
  const TssaProblem& p = b.problem;
  const int share = (p.seqlen + S::kBlocks - 1) / S::kBlocks;
  const Shared at(share);
  float* const memory = reinterpret_cast<float*>(shared_memory());
  float *const first = memory + Shared::kFirst, *const second = memory + Shared::kSecond,
               *const gates = memory + Shared::kChannels, *const dmoment = gates + S::kWidth,
               *const dmass = memory + Shared::kHeads, *const dlogit = memory + at.dlogit,
               *const key_weights = memory + at.key_weights, *const scratch = memory + at.scratch;
  TssaMeeting<S> meeting(b);
  const TssaVectorOf<S> v;
  const TssaLayout<S> w_layout(b.w, share), dout_layout(b.dout, share);
  const TssaBackwardFetch<S> fetch = {b, w_layout, dout_layout, shared_address(memory), at};
  float* const sums = scratch + v.group * S::kSums;  // of the thread's group
  const int place = v.group * S::kRow + v.vector;    // of the first sum over the vector's channels

  each_sequence<S>(p, fetch, [&](int index, int buffer, uint32_t phase) {
    const TssaSpan s = span_of<S>(p, index);
    const int rows = s.rows();
    const TssaPlace w = place_of<S>(v, w_layout, fetch.tokens(buffer, 0)),
                    dout = place_of<S>(v, dout_layout, fetch.tokens(buffer, 1));
    const float *const members = memory + at.members + buffer * at.by_head,
                       *const energies = memory + Shared::kStatistics + 2 * buffer * S::kWidth,
                       *const moments = energies + S::kWidth;
    put_key_weights<S>(p, s, key_weights);
    fetch.wait(buffer, phase);
    each_four<S, S::kWidth>([&](int column) {
      const int h = column / HEAD_DIM;
      put_four(gates + column, gates_of(p, four_at(moments + column), index, h, column - h * HEAD_DIM));
    });
    __syncthreads();
    {
      float acc[8] = {}, gate[8], mass = 0.0f;  // (8 channels,) per thread; of its head
      get_vector(gates + v.column(), gate);
      const auto products = [&](int first, int end) {
        uint32_t from = w.address + first * w.pitch, from_g = dout.address + first * dout.pitch;
        float* to = scratch + place;
#pragma unroll 2
        for (int n = first + v.group; n < end; n += S::kGroups) {
          float x[8], g[8], even = 0.0f, odd = 0.0f;  // (8 channels,) of a token
          load_vector<T>(from, x);
          load_vector<T>(from_g, g);
          const float member = members[n * HEADS + v.head];
          mass += member * key_weight<S>(key_weights, n);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float both = x[i] * g[i];
            (i % 2 == 0 ? even : odd) += both * gate[i];
            acc[i] += both * member;
          }
          *to = even + odd;
          from += w.step, from_g += dout.step, to += S::kGroups * S::kRow;
        }
      };
      each_slice<S>(rows, products, [&](int n, int row, int head, bool own) {
#pragma unroll
        for (int j = 0; j < S::kOfLane && own; ++j) {
          dlogit[n * HEADS + head + j] = sum_of<S::kPerHead>(scratch + row * S::kRow + (head + j) * S::kPerHead);
        }
      });
      put_vector(sums + v.column(), acc);
      if (v.channel == 0) sums[S::kWidth + v.head] = mass;
    }
    __syncthreads();
    add_groups<S, S::kSums>(scratch, first);
    meet<S>(first, meeting);
    each_four<S, S::kWidth>([&](int column) {
      const float inverse = inverse_of(total_of<S>(first + S::kWidth + column / HEAD_DIM) + kMassFloor);
      const float4 product = total_4<S>(first + column), gate = four_at(gates + column),
                   moment = four_at(moments + column);
      const auto of = [&](float product, float gate, float moment) {
        return product * gate * inverse_of(1.0f + moment) * inverse;
      };
      put_four(dmoment + column, make_float4(of(product.x, gate.x, moment.x), of(product.y, gate.y, moment.y),
                                             of(product.z, gate.z, moment.z), of(product.w, gate.w, moment.w)));
    });
    __syncthreads();
    mass_gradient(p, dmoment, dmass, [&](int h, int d) { return moments[h * HEAD_DIM + d]; });
    {
      float of[8];  // (8 channels,) per thread: dM
      get_vector(dmoment + v.column(), of);
      const TssaRows dmembership = optional_rows_of(p, b.dmembership, s);
      const auto gradients = [&](int first, int end) {
        uint32_t from = w.address + first * w.pitch;
        float* to = scratch + place;
#pragma unroll 4
        for (int n = first + v.group; n < end; n += S::kGroups) {
          float x[8], even = 0.0f, odd = 0.0f;  // (8 channels,) of a token
          load_vector<T>(from, x);
#pragma unroll
          for (int i = 0; i < 8; i += 2) {
            even += x[i] * x[i] * of[i];
            odd += x[i + 1] * x[i + 1] * of[i + 1];
          }
          *to = even + odd;
          from += w.step, to += S::kGroups * S::kRow;
        }
      };
      each_slice<S>(rows, gradients, [&](int n, int row, int head, bool own) {
        softmax_backward_of_heads<S>(scratch + row * S::kRow, dmass, members, key_weight<S>(key_weights, n),
                                     dmembership, n, head, own, dlogit);
      });
    }
    {
      float acc[8] = {}, inverse[8];  // (8 channels,) per thread
      get_vector(energies + v.column(), inverse);
#pragma unroll
      for (int i = 0; i < 8; ++i) inverse[i] = inverse_of(floored(inverse[i], kFullFloor));
      uint32_t from = w.address;
#pragma unroll 4
      for (int n = v.group; n < rows; n += S::kGroups, from += w.step) {
        float x[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        const float gradient = dlogit[n * HEADS + v.head];
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] += x[i] * x[i] * inverse[i] * gradient;  // in this order: no underflow
      }
      put_vector(sums + v.column(), acc);
    }
    __syncthreads();
    add_groups<S, S::kWidth>(scratch, second);
    meet<S>(second, meeting);
    // Every block has read `first`: it can take the totals.
    each_four<S, S::kWidth>([&](int column) { put_four(first + column, total_4<S>(second + column)); });
    __syncthreads();
    if (s.chunk == 0) temp_gradient(p, first, b.dtemp + static_cast<int64_t>(index) * HEADS);
    {
      float gate[8], of[8], twice[8], mean[8];  // (8 channels,) per thread
      get_vector(gates + v.column(), gate);
      get_vector(dmoment + v.column(), of);
      get_vector(first + v.column(), mean);
      get_vector(energies + v.column(), twice);
      const float temp = 2.0f * p.temp[v.head];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // as slopes_of of full_backward_steps.cuh
        const bool above = twice[i] > kFullFloor, alone = above && s.count == 1;
        twice[i] = alone ? 0.0f : temp * inverse_of(floored(twice[i], kFullFloor));
        mean[i] = above && !alone ? mean[i] : 0.0f;
        of[i] *= 2.0f;
      }
      const TssaTokens dw = part_of(p, b.dw, s);
      T* to = reinterpret_cast<T*>(dw.data) + dw.at(v.group, v.head, v.channel);
      const int64_t ahead = S::kGroups * dw.token;
      uint32_t from = w.address, from_g = dout.address;
#pragma unroll 2
      for (int n = v.group; n < rows; n += S::kGroups, to += ahead) {
        float x[8], g[8];  // (8 channels,) of a token
        load_vector<T>(from, x);
        load_vector<T>(from_g, g);
        const float member = members[n * HEADS + v.head], gradient = dlogit[n * HEADS + v.head],
                    counted = key_weight<S>(key_weights, n), weight = member * counted;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float from_mean = MASKED ? gradient - counted * mean[i] : gradient - mean[i];
          x[i] = x[i] * (weight * of[i] + from_mean * twice[i]) - g[i] * (member * gate[i]);
        }
        store_vector(to, x);
        from += w.step, from_g += dout.step;
      }
    }
    if (s.chunk == 0) clear_uncovered(p, TssaHalves{{p.dtype}}, b.dw, nullptr, s);
  });
  copy_async_wait<0>();  // of no copies
}

}  // namespace crate_kernels
