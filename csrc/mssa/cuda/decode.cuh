// Decoding with a SubspaceCache: a few new tokens of each head against its cached ones. Memory traffic of the cache
// limits a step, so each cached row is read once, 16 bytes per lane, and stays in registers as key and as value.
//
// A row is spread over `lanes` lanes. Each of the 32 / lanes slots of a warp walks over its own keys with its own
// softmax. At the end slots, then warps, then blocks are combined by their largest scores. A block attends with TOKENS
// new tokens over one of `splits` stretches of the cached sequence. The block of the last stretch also attends over the
// new tokens, and appends its own to the cache, where no block of this launch reads. The combining kernel advances the
// lengths: nothing reads them after it.
#pragma once

#include "head.cuh"

namespace crate_kernels::decoding {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;

using mssa::CacheSpace, mssa::Head, mssa::View;

// A forward of the new tokens whose keys are the cache. blocks: groups of TOKENS new tokens.
struct Step : mssa::Problem {
  float *part, *statistics;  // per stretch: sum of weighted rows; largest score and sum of weights
  int splits, lanes;
};

// A lane's part of a row of whole packs: VECTORS of them.
template <class T, int VECTORS>
struct Slice {
  Pack<T> pack[VECTORS];  // (VECTORS packs,) per lane: every c.lanes-th of the row

  CRATE_DEVICE void load(const View<T>& t, int row, bool exists, int lane, const Step& c) {
    unroll<VECTORS>([&](int v) {
      const int channel = (v * c.lanes + lane) * Pack<T>::kCount;
      pack[v] = exists && channel < c.access.head_dim ? load_pack(t.data + row * t.row + channel) : Pack<T>{};
    });
  }
  CRATE_DEVICE float at(int n) const { return to_float(pack[n / Pack<T>::kCount].at[n % Pack<T>::kCount]); }
};

// The softmax of a new token over a slot's keys so far; `out` is the lane's part.
template <int CHANNELS>
struct Attention {
  float largest = -INFINITY, sum = 0.0f, out[CHANNELS] = {};

  CRATE_DEVICE void shrink_to(float base) {
    const float shrink = expf(largest - base);
    sum *= shrink;
    unroll<CHANNELS>([&](int d) { out[d] *= shrink; });
  }
  // Without a key, any finite base makes the weights 0 instead of NaN.
  CRATE_DEVICE static float finite(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  // Add the state of the slots `step` lanes away; both sides get the same.
  CRATE_DEVICE void merge(int step) {
    const float other = __shfl_xor_sync(kAllLanes, largest, step), both = fmaxf(largest, other);
    shrink_to(finite(both));
    largest = both;
    sum += __shfl_xor_sync(kAllLanes, sum, step);
    unroll<CHANNELS>([&](int d) { out[d] += __shfl_xor_sync(kAllLanes, out[d], step); });
  }
};

// Attend with TOKENS tokens over KEYS keys per slot of rows [first, stop). Token n is at position `query` + n among
// them.
template <class T, int TOKENS, int VECTORS, int KEYS>
CRATE_DEVICE void attend(Attention<VECTORS * Pack<T>::kCount> (&state)[TOKENS],
                         const Slice<T, VECTORS> (&token)[TOKENS], const View<T>& rows, int first, int stop, int query,
                         const Step& c) {
  constexpr int kChannels = VECTORS * Pack<T>::kCount;
  const int lane = threadIdx.x % c.lanes, slot = threadIdx.x % kWarp / c.lanes, slots = kWarp / c.lanes;
  Slice<T, VECTORS> row[KEYS];  // (KEYS, head_dim) per slot
  unroll<KEYS>([&](int u) {
    const int key = first + u * slots + slot;
    row[u].load(rows, key, key < stop, lane, c);
  });
  unroll<TOKENS>([&](int n) {
    float p[KEYS] = {};  // (KEYS,) per slot: scores of one token
    unroll<kChannels>([&](int d) {
      const float q = token[n].at(d);
      unroll<KEYS>([&](int u) { p[u] += q * row[u].at(d); });
    });
    for (int step = c.lanes / 2; step > 0; step /= 2) {
      unroll<KEYS>([&](int u) { p[u] += __shfl_xor_sync(kAllLanes, p[u], step); });
    }
    Attention<kChannels>& s = state[n];
    float largest = s.largest;
    unroll<KEYS>([&](int u) {
      const int key = first + u * slots + slot;
      p[u] = key < stop && sees(mssa::cache_mask(), query + n, key) ? __fmul_rn(p[u], c.scale) : -INFINITY;
      largest = fmaxf(largest, p[u]);
    });
    const float base = s.finite(largest);
    s.shrink_to(base);
    s.largest = largest;
    float sum = 0.0f;
    unroll<KEYS>([&](int u) { sum += p[u] = expf(p[u] - base); });
    s.sum += sum;
    unroll<kChannels>([&](int d) {
      float weighted = 0.0f;
      unroll<KEYS>([&](int u) { weighted += p[u] * row[u].at(d); });
      s.out[d] += weighted;
    });
  });
}

// Parts of one token's softmax together. Part n has its largest score and its sum at statistics + n * step, and one
// channel of its weighted rows at out + n * pitch.
CRATE_DEVICE Attention<1> combine(const float* statistics, int64_t step, const float* out, int64_t pitch, int parts) {
  Attention<1> all;
  for (int n = 0; n < parts; ++n) all.largest = fmaxf(all.largest, statistics[n * step]);
  const float base = all.finite(all.largest);
  for (int n = 0; n < parts; ++n) {
    const float share = expf(statistics[n * step] - base);
    all.sum += statistics[n * step + 1] * share;
    all.out[0] += out[n * pitch] * share;
  }
  return all;
}

// Append the new tokens from `token` on, `count` at most, that fit.
template <class T>
CRATE_DEVICE void append_rows(const mssa::Problem& c, const CacheSpace& space, const View<T>& w, const View<T>& cache,
                              int token, int count) {
  const int head_dim = c.access.head_dim, rows = min(space.appended - token, count);
  for (int n = threadIdx.x; n < rows * head_dim; n += kThreads) {
    const int64_t row = token + n / head_dim, d = n % head_dim;
    cache.data[(space.cached + row) * cache.row + d * cache.channel] = w.data[row * w.row + d * w.channel];
  }
}

// Write the results of TOKENS new tokens for one stretch: part (heads, splits, count, head_dim), statistics (..., 2).
template <class T, int TOKENS, int VECTORS>
__global__ void __launch_bounds__(kThreads, TOKENS == 1 ? 4 : 2) mssa_decode_kernel(Step c) {
  constexpr int kCount = Pack<T>::kCount, kChannels = VECTORS * kCount, kKeys = TOKENS == 1 ? 8 : 4;
  const int split = blockIdx.x % c.splits, place = blockIdx.x / c.splits;
  const Head head(c, place / c.blocks);
  const int token = place % c.blocks * TOKENS, head_dim = c.access.head_dim;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % c.lanes;
  const CacheSpace space = space_of(c, head);
  const View<T> w = head.view<T>(c, c.inputs.w), cache = head.view<T>(c, c.inputs.keys);

  Slice<T, VECTORS> query[TOKENS];     // (TOKENS, head_dim) per slot
  Attention<kChannels> state[TOKENS];  // (TOKENS, head_dim) per slot
  unroll<TOKENS>([&](int n) { query[n].load(w, token + n, token + n < c.seqlen, lane, c); });

  const int step = kKeys * (kWarp / c.lanes);  // keys of a warp at once
  const int stretch = (space.cached + c.splits - 1) / c.splits, begin = split * stretch;
  const int end = begin + stretch < space.cached ? begin + stretch : space.cached;
  for (int first = begin + warp * step; first < end; first += kWarps * step) {
    attend<T, TOKENS, VECTORS, kKeys>(state, query, cache, first, end, space.cached + token, c);
  }
  if (split == c.splits - 1) {
    const int seen = token + TOKENS < space.appended ? token + TOKENS : space.appended;
    for (int first = warp * step; first < seen; first += kWarps * step) {
      attend<T, TOKENS, VECTORS, kKeys>(state, query, w, first, seen, token, c);
    }
    append_rows(c, space, w, cache, token, TOKENS);
  }

  float* const left = reinterpret_cast<float*>(shared_memory());  // (kWarps, TOKENS, head_dim + 2)
  unroll<TOKENS>([&](int n) {
    for (int other = c.lanes; other < static_cast<int>(kWarp); other *= 2) state[n].merge(other);
    float* const mine = left + (warp * TOKENS + n) * (head_dim + 2);
    if (threadIdx.x % kWarp >= static_cast<unsigned>(c.lanes)) return;
    unroll<kChannels>([&](int d) {
      const int channel = (d / kCount * c.lanes + lane) * kCount + d % kCount;
      if (channel < head_dim) mine[channel] = state[n].out[d];
    });
    if (lane == 0) {
      mine[head_dim] = state[n].largest;
      mine[head_dim + 1] = state[n].sum;
    }
  });
  __syncthreads();
  const int tokens = c.seqlen - token < TOKENS ? c.seqlen - token : TOKENS;
  for (int n = threadIdx.x; n < tokens * head_dim; n += kThreads) {
    const int which = n / head_dim, d = n % head_dim;
    const float* const first = left + which * (head_dim + 2);
    const int pitch = TOKENS * (head_dim + 2);
    const Attention<1> all = combine(first + head_dim, pitch, first + d, pitch, kWarps);
    const int64_t row = (static_cast<int64_t>(head.counter) * c.splits + split) * c.seqlen + token + which;
    c.part[row * head_dim + d] = all.out[0];
    if (d == 0) {
      c.statistics[2 * row] = all.largest;
      c.statistics[2 * row + 1] = all.sum;
    }
  }
}

CRATE_DEVICE void advance(const mssa::Problem& c, const Head& head) {
  const CacheSpace space = space_of(c, head);
  __syncwarp();  // every lane has read the length
  if (threadIdx.x == 0) c.masking.cache_lengths[head.sequence] = space.cached + space.appended;
}

// Write out and lse of one new token of one head from the stretches; a sequence's first block advances its length.
template <class T>
__global__ void __launch_bounds__(256) mssa_decode_combine_kernel(Step c) {
  const int token = blockIdx.x % c.seqlen, d = threadIdx.x, head_dim = c.access.head_dim;
  const Head head(c, blockIdx.x / c.seqlen);
  const int64_t first = head.row * c.splits + token;
  const float* const out = c.part + first * head_dim + min(d, head_dim - 1);
  const Attention<1> all = combine(c.statistics + 2 * first, 2 * c.seqlen, out, c.seqlen * head_dim, c.splits);
  const bool empty = all.sum == 0.0f;
  if (d < head_dim) {
    const View<T> to = head.view<T>(c, c.outputs.out);
    to.data[token * to.row + d * to.channel] = from_float<T>(empty ? 0.0f : all.out[0] / all.sum);
  }
  if (d == 0 && c.outputs.lse != nullptr) c.outputs.lse[head.row + token] = mssa::lse_of(all.largest, all.sum);
  if (head.head == 0 && token == 0 && threadIdx.x < kWarp) advance(c, head);
}

// Copy the new tokens of a head to the cache and leave the lengths as they are; blocks take kThreads tokens each.
template <class T>
__global__ void __launch_bounds__(kThreads) mssa_append_kernel(mssa::Problem c) {
  const Head head(c, blockIdx.x / c.blocks);
  append_rows(c, space_of(c, head), head.view<T>(c, c.inputs.w), head.view<T>(c, c.inputs.keys),
              blockIdx.x % c.blocks * kThreads, kThreads);
}

// Advance the lengths, one warp per sequence.
__global__ void __launch_bounds__(kWarp) mssa_advance_kernel(mssa::Problem c) {
  advance(c, Head(c, blockIdx.x * c.nheads));
}

}  // namespace crate_kernels::decoding
