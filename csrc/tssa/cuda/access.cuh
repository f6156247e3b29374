// Reads and writes elements, and shares them among threads.
#pragma once

#include <cfloat>

#include "call.cuh"

namespace crate_kernels {

// N neighbouring channels of one head between memory and fp32, in one access of 8 or 16 bytes. Of two half-precision
// dtypes, the one is decided at run time, alike in all threads: half as many kernels to compile, for at most one
// instruction per channel.
template <int N, bool kSingle, bool kHalf>
struct TssaVector {
  static constexpr int kCount = N;
  using Bits = uint4;
  Dtype dtype;

  CRATE_DEVICE bool single() const { return kSingle && (!kHalf || dtype == Dtype::f32); }

  // Where one dtype's access is 16 bytes, to copy.
  CRATE_DEVICE Bits* place(const TssaTokens& t, int n, int h, int d) const {
    static_assert(kSingle != kHalf, "one size of elements");
    return reinterpret_cast<Bits*>(t.data + t.at(n, h, d) * (kSingle ? sizeof(float) : sizeof(bf16)));
  }

  CRATE_DEVICE void load(const TssaTokens& t, int n, int h, int d, float (&x)[N]) const {
    const int64_t at = t.at(n, h, d);
    if constexpr (kSingle) {
      if (single()) {
        const uint4 bits = *reinterpret_cast<const uint4*>(t.data + at * sizeof(float));
        memcpy(x, &bits, sizeof bits);
        return;
      }
    }
    if constexpr (kHalf) {
      using Halves = std::conditional_t<N == 8, uint4, uint2>;
      const Halves bits = *reinterpret_cast<const Halves*>(t.data + at * sizeof(bf16));
      uint32_t pairs[N / 2];
      memcpy(pairs, &bits, sizeof bits);
      dtype == Dtype::bf16 ? unpack<bf16>(pairs, x) : unpack<fp16>(pairs, x);
    }
  }

  CRATE_DEVICE void store(const TssaTokens& t, int n, int h, int d, const float (&x)[N]) const {
    const int64_t at = t.at(n, h, d);
    if constexpr (kSingle) {
      if (single()) {
        uint4 bits;
        memcpy(&bits, x, sizeof bits);
        *reinterpret_cast<uint4*>(t.data + at * sizeof(float)) = bits;
        return;
      }
    }
    if constexpr (kHalf) {
      using Halves = std::conditional_t<N == 8, uint4, uint2>;
      uint32_t pairs[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        pairs[i] =
            dtype == Dtype::bf16 ? pack_pair<bf16>(x[2 * i], x[2 * i + 1]) : pack_pair<fp16>(x[2 * i], x[2 * i + 1]);
      }
      Halves bits;
      memcpy(&bits, pairs, sizeof bits);
      *reinterpret_cast<Halves*>(t.data + at * sizeof(bf16)) = bits;
    }
  }

 private:
  template <class T>
  static CRATE_DEVICE void unpack(const uint32_t (&pairs)[N / 2], float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 both = unpack_pair<T>(pairs[i]);
      x[2 * i] = both.x;
      x[2 * i + 1] = both.y;
    }
  }
};
struct TssaFloats : TssaVector<4, true, false> {};
struct TssaHalves : TssaVector<8, false, true> {};
// Any dtype: a thread's registers hold the running sums of four channels.
struct TssaFours : TssaVector<4, true, true> {};

// One element of any strides and alignment, for rare calls. The dtype is decided at run time.
struct TssaScalars {
  static constexpr int kCount = 1;
  Dtype dtype;

  CRATE_DEVICE bool single() const { return dtype == Dtype::f32; }

  CRATE_DEVICE void load(const TssaTokens& t, int n, int h, int d, float (&x)[1]) const {
    const int64_t at = t.at(n, h, d);
    if (single()) {
      x[0] = reinterpret_cast<const float*>(t.data)[at];
    } else {
      const uint16_t bits = reinterpret_cast<const uint16_t*>(t.data)[at];
      x[0] = dtype == Dtype::bf16 ? to_float(bf16{bits}) : to_float(fp16{bits});
    }
  }

  CRATE_DEVICE void store(const TssaTokens& t, int n, int h, int d, const float (&x)[1]) const {
    const int64_t at = t.at(n, h, d);
    if (single()) {
      reinterpret_cast<float*>(t.data)[at] = x[0];
    } else {
      const uint16_t bits = dtype == Dtype::bf16 ? from_float<bf16>(x[0]).bits : from_float<fp16>(x[0]).bits;
      reinterpret_cast<uint16_t*>(t.data)[at] = bits;
    }
  }
};

// 1 / c and, of fp32 tokens, what its rounding left: x times their sum is x / c, exactly 1 where x is c. Tokens of 16
// bits have too few digits for a difference.
struct TssaReciprocal {
  float inverse, rest;

  CRATE_DEVICE explicit TssaReciprocal(float c)
      : inverse(1.0f / c), rest(fmaf(-fminf(c, FLT_MAX), inverse, 1.0f) * inverse) {}
  CRATE_DEVICE TssaReciprocal(float inverse, float rest) : inverse(inverse), rest(rest) {}

  template <class Access>
  CRATE_DEVICE float ratio(const Access& access, float x) const {
    return access.single() ? fmaf(x, inverse, x * rest) : x * inverse;
  }
};

// Calls f(head, channel, group, groups) for each of the thread's vectors of N channels. With fewer vectors than
// threads, groups of threads share the rows. With more, a thread has several vectors.
template <int N, class F>
CRATE_DEVICE void each_column(const TssaProblem& p, F f) {
  const int vectors = p.width / N, per_head = p.head_dim / N;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int groups = vectors < threads ? threads / vectors : 1, group = groups > 1 ? thread / vectors : 0;
  if (group >= groups) return;
  for (int v = thread - group * vectors; v < vectors; v += threads) {
    const int h = v / per_head;
    f(h, (v - h * per_head) * N, group, groups);
  }
}

// sums[channel of the token] = the sum over `rows` of values, from terms(row, head, channel, values). Adds within a
// thread, then over the groups of threads, in a fixed order. `scratch` has N floats per thread, and is in use until the
// caller's next barrier.
template <int N, class Terms>
CRATE_DEVICE void sum_columns(const TssaProblem& p, int rows, float* scratch, float* sums, Terms terms) {
  const int threads = static_cast<int>(blockDim.x), spread = threads / (p.width / N);
  float* const to = spread > 1 ? scratch : sums;
  each_column<N>(p, [&](int h, int d, int group, int groups) {
    float acc[N] = {};  // (N channels,) per thread
#pragma unroll 2
    for (int n = group; n < rows; n += groups) {
      float values[N];  // (N channels,) of a token
      terms(n, h, d, values);
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += values[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) to[group * p.width + h * p.head_dim + d + i] = acc[i];
  });
  if (spread <= 1) return;
  __syncthreads();
  for (int column = threadIdx.x; column < p.width; column += threads) {
    float total = 0.0f;
    for (int group = 0; group < spread; ++group) total += scratch[group * p.width + column];
    sums[column] = total;
  }
}

// sums[h] = the sum of terms(row, h) over `rows`; one warp per head.
template <class Terms>
CRATE_DEVICE void sum_rows(const TssaProblem& p, int rows, float* sums, Terms terms) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  for (int h = warp; h < p.nheads; h += warps) {
    float total = 0.0f;
    for (int n = lane; n < rows; n += kWarp) total += terms(n, h);
    total = warp_sum(total);
    if (lane == 0) sums[h] = total;
  }
}

// For one token in one warp: calls store(h, total) with the sum of values over a head's channels; terms(h, channel,
// values) gives the values. The numbers of a vector are added in fp32, vectors in Sum.
template <int N, class Sum, class Terms, class Store>
CRATE_DEVICE void sum_channels(const TssaProblem& p, Terms terms, Store store) {
  const int lane = threadIdx.x % kWarp, own = lane % p.lanes, heads = kWarp / p.lanes, per_head = p.head_dim / N;
  for (int group = 0; group < p.nheads; group += heads) {
    const int h = group + lane / p.lanes;
    Sum total = 0;
    if (h < p.nheads) {
      for (int v = own; v < per_head; v += p.lanes) {
        float values[N], some = 0.0f;  // (N channels,) of a token
        terms(h, v * N, values);
#pragma unroll
        for (int i = 0; i < N; ++i) some += values[i];
        total += some;
      }
    }
    for (int step = p.lanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
    if (own == 0 && h < p.nheads) store(h, total);
  }
  __syncwarp();
}

// Writes zeros to the packed rows between a sequence and the next one, and to those before the first. Usually there are
// none. `rows` is the membership, cleared in the same way, or null.
template <class Access>
CRATE_DEVICE void clear_uncovered(const TssaProblem& p, const Access& access, const TssaTokens& tokens, float* rows,
                                  const TssaSpan& s) {
  if (p.cu_seqlens == nullptr) return;
  const int64_t end = s.origin + s.count, next = s.index + 1 < p.nsequences ? packed_offset(p, s.index + 1) : p.total;
  for (int64_t n = s.index == 0 ? 0 : end; n < next; ++n) {
    if (n == s.origin && end > n) n = end;
    if (n >= next) return;
    each_column<Access::kCount>(p, [&](int h, int d, int group, int) {
      if (group > 0) return;
      const float zeros[Access::kCount] = {};
      access.store({tokens.data + n * tokens.token * p.itemsize(), 0, tokens.head, 0, tokens.channel}, 0, h, d, zeros);
    });
    if (rows == nullptr) continue;
    for (int h = threadIdx.x; h < p.nheads; h += blockDim.x) rows[n + h * p.rows_head] = 0.0f;
  }
}

}  // namespace crate_kernels
