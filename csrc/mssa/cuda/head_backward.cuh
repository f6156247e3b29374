// The backward of whole heads on sm_90a: every token of a head is in shared memory, which is read and written once.
// head_gradient.cuh has the equations, and the products.
#pragma once

#include "head_gradient.cuh"
#include "scaled_row.cuh"

namespace crate_kernels::mssa {

// Copies w, g and w^ of a head.
template <class S>
CRATE_DEVICE void load_head(const HeadCall& call, int index, uint32_t stage) {
  const Head head(call, index);
  load_tokens<S>(call, head, call.w, stage);
  load_tokens<S>(call, head, call.dout, stage + S::kTokens);
  if constexpr (S::kMasked) load_tokens<S>(call, head, call.w, stage + 2 * S::kTokens, head.key_mask(call));
}

// The factor of a head's gradients.
template <class S>
CRATE_DEVICE float gradient_unit(const HeadCall& call, const Head& head, const HeadPlace& place, uint32_t g) {
  using T = typename S::T;
  const int id = fresh(threadIdx.x);
  float maximum = 0.0f;
#pragma unroll 1
  for (int n = id; n < S::kRows * 8 * S::kPanels; n += S::kThreads) {
    const uint4 bits = load_shared_4(g + 16 * n);
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    unroll<4>([&](int i) {
      const float2 pair = unpack_pair<T>(pairs[i]);
      maximum = fmaxf(maximum, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    });
  }
  for (int row = id; call.dlse != nullptr && row < head.length; row += S::kThreads) {
    maximum = fmaxf(maximum, BackwardRange<T>::as_g(call.dlse[head.row + row], call.scale));
  }
  maximum = warp_max(maximum);
  if (place.lane() == 0) store_shared(place.base + S::kNumbers + 128 + 4 * (id >> 5), maximum);
  barrier_sync(kAllThreads, S::kThreads);
#pragma unroll
  for (int n = 0; n < S::kThreads / 32; ++n)
    maximum = fmaxf(maximum, load_shared(place.base + S::kNumbers + 128 + 4 * n));
  return BackwardRange<T>::unit(maximum);
}

// g becomes g^ in place, and d^ and what says whether a row is a key are written. Returns whether the rounding of out
// would show in dw, in some row.
template <class S>
CRATE_DEVICE bool scale_gradients(const HeadCall& call, const Head& head, const HeadPlace& place, uint32_t w, float c,
                                  float unit) {
  using T = typename S::T;
  const uint32_t g = w + S::kTokens;
  const int id = fresh(threadIdx.x), chunk = id & 7;
  const T* const out = head.first<const T>(call, call.out);
  const uint8_t* const key_mask = head.key_mask(call);
  bool shows = false;
#pragma unroll 1
  for (int first = 0; first < S::kRows; first += S::kThreads / 8) {
    const int row = first + (id >> 3);
    const bool there = row < head.length;
    ScaledRow<T> scaled;
    float inverse = 0.0f;
    const float lse = there ? call.lse[head.row + row] : -INFINITY;
    if (lse != -INFINITY) inverse = exp2_fast(c - lse * kLog2E) * unit;
    if (row < S::kRows) {
#pragma unroll
      for (int panel = 0; panel < S::kPanels; ++panel) {
        const int channel = 64 * panel + 8 * chunk;
        const uint32_t at = g + panel * S::kPanel + chunk_at(row, chunk);
        uint4 out_pack = {0, 0, 0, 0};
        if (there && channel < call.head_dim) {
          out_pack = *reinterpret_cast<const uint4*>(out + row * call.out.row + channel);
        }
        store_shared_4(at, scaled.add(load_shared_4(at), out_pack, load_shared_4(at - S::kTokens), inverse));
      }
    }
    scaled.finish();
    shows |= scaled.shows(call.scale, lse, !S::kMasked || (there && key_mask[row]));
    if (chunk == 0 && row < S::kRows) {
      if (call.dlse != nullptr && there) scaled.delta -= call.dlse[head.row + row] * inverse;
      store_shared(place.base + S::kDeltas + 4 * row, scaled.delta);
      if constexpr (S::kMasked) store_shared(place.base + S::kIsKey + 4 * row, there && key_mask[row] ? 1.0f : 0.0f);
    }
  }
  return shows;
}

// The rows of the tail: sum over all rows of A w and E g^, as channels times tokens.
template <class S>
CRATE_DEVICE void add_tail(const HeadCall& call, const Head& head, const HeadGradient<S>& gradient, float back) {
  using T = typename S::T;
  const HeadPlace at = gradient.at;
  float sums[S::kPanels][S::kTail / 2];  // (64 kPanels channels, kTail rows) per warp group
  const auto add = [&](auto panel) {
    constexpr int kPanel = decltype(panel)::value;
    const uint32_t channels = kPanel * S::kPanel;
#pragma unroll
    for (int kk = 0; kk < S::kRows / 16; ++kk) {
      Wgmma<T, S::kTail>::template ss<true, true>(
          sums[kPanel], advance(matrix_descriptor(gradient.w + channels, 0, 1024), 2048 * kk),
          Columns<S::kTail>::descriptor(at.base + S::kAColumns, 16 * kk), kk > 0);
      if (S::kCausal && kk < 4 * S::kBlocks) continue;  // rows before the tail are no queries of its keys
      Wgmma<T, S::kTail>::template ss<true, true>(
          sums[kPanel], advance(matrix_descriptor(gradient.w + S::kTokens + channels, 0, 1024), 2048 * kk),
          Columns<S::kTail>::descriptor(at.base + S::kEColumns, 16 * kk), true);
    }
  };
  wgmma_fence();
  add(std::integral_constant<int, 0>{});
  if constexpr (S::kPanels > 1) add(std::integral_constant<int, 1>{});
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) pin(sums[panel]);
  T* const dw = head.first<T>(call, call.dw);
  const int lane = at.lane();
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
#pragma unroll
    for (int i = 0; i < S::kTail / 2; ++i) {
      const int row = 64 * S::kBlocks + i / 4 * 8 + (lane & 3) * 2 + i % 2;
      const int channel = 64 * panel + 16 * at.warp + (lane >> 2) + i % 4 / 2 * 8;
      if (row < head.length && channel < call.head_dim) {
        dw[row * call.dw.row + channel] = from_float<T>(sums[panel][i] * back);
      }
    }
  }
}

template <class T, int DIM, int ROWS, bool MASKED, bool CAUSAL>
__global__ void __launch_bounds__(HeadBackwardShape<T, DIM, ROWS, MASKED, CAUSAL>::kThreads, 1)
    head_backward_kernel(const __grid_constant__ HeadCall call) {
  using S = HeadBackwardShape<T, DIM, ROWS, MASKED, CAUSAL>;
  constexpr int kWarps = S::kThreads / 32;
  const uint32_t base = shared_address(aligned_shared_memory());
  const HeadPlace place = {base, __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 7), 0),
                           __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5 & 3), 0)};
  int index = blockIdx.x;
  uint32_t stage = base;
  if (index < call.heads) load_head<S>(call, index, stage);
  copy_async_commit();
#pragma unroll 1
  while (index < call.heads) {
    const int next = index + gridDim.x;
    const Head head(call, index);
    // The largest lse bounds every score of a key.
    const int id = fresh(threadIdx.x);
    float maximum = -INFINITY, minimum = INFINITY;
    if (id < head.length) {
      const float lse = call.lse[head.row + id] * kLog2E;
      if (lse != -INFINITY) maximum = minimum = lse;
    }
    maximum = warp_max(maximum), minimum = -warp_max(-minimum);
    if (place.lane() == 0) {
      store_shared(place.base + S::kNumbers + 8 * (id >> 5), maximum);
      store_shared(place.base + S::kNumbers + 8 * (id >> 5) + 4, minimum);
    }
    copy_async_wait<0>();
    barrier_sync(kAllThreads, S::kThreads);
    if (S::kStages == 2) {
      if (next < call.heads) load_head<S>(call, next, 2 * base + S::kStage - stage);
      copy_async_commit();
    }
#pragma unroll
    for (int n = 0; n < kWarps; ++n) {
      const float2 of_warp = load_shared_2(place.base + S::kNumbers + 8 * n);
      maximum = fmaxf(maximum, of_warp.x), minimum = fminf(minimum, of_warp.y);
    }
    const bool none = maximum == -INFINITY;  // no row has a key
    const float c = none ? 0.0f : maximum - S::kTop;
    const bool fits = none || BackwardRange<T>::holds(minimum, maximum);
    if (threadIdx.x == 0) call.left[index] = fits ? 0 : head.length;
    float unit = 1.0f;
    if (fits) {
      if constexpr (S::kHalf) unit = gradient_unit<S>(call, head, place, stage + S::kTokens);
      HeadGradient<S> gradient = {place, stage, 0, call.factor, c, call.scale, {}, {}, {}, {}, {}};
      const bool shows = scale_gradients<S>(call, head, place, stage, c, unit);
      fence_async_shared();
      const bool of_warp = __ballot_sync(kAllLanes, shows) != 0;
      if (place.lane() == 0) store_shared(place.base + S::kNumbers + 192 + 4 * (id >> 5), of_warp ? 1.0f : 0.0f);
      barrier_sync(kAllThreads, S::kThreads);
      bool sums = false;
#pragma unroll
      for (int n = 0; n < kWarps; ++n) sums = sums || load_shared(place.base + S::kNumbers + 192 + 4 * n) != 0.0f;
      if (sums) {
#pragma unroll 1
        for (int tail = 0; tail <= (S::kTail > 0 && place.group == 0); ++tail) {
          gradient.sum_deltas(call, index, tail ? S::kRows - 64 : 64 * place.group, tail, unit);
        }
        barrier_sync(kAllThreads, S::kThreads);
      }
      gradient.left = stage + 64 * place.group * kRowBytes;
      const int row = 64 * place.group + 16 * place.warp + (place.lane() >> 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        gradient.delta[half] = load_shared(place.base + S::kDeltas + 4 * (row + 8 * half));
        gradient.is_key[half] = S::kMasked ? load_shared(place.base + S::kIsKey + 4 * (row + 8 * half)) : 1.0f;
      }
      if constexpr (S::kCausal) {
        if (place.group == 0) gradient.template walk_all<0>();
        if (S::kBlocks > 1 && place.group == 1) gradient.template walk_all<1>();
        if (S::kBlocks > 2 && place.group == 2) gradient.template walk_all<2>();
      } else {
        gradient.template walk_all<0>();
      }
      const uint32_t own = base + S::kStagingAt + fresh(place.group * 4 + place.warp) * S::kPanels * 16 * kRowBytes;
      stage_rows<T, DIM>(own, gradient.acc, 1.0f / unit, 1.0f / unit, place.lane());
      __syncwarp();
      const Head own_head(call, fresh(index));
      store_rows<S>(call, own_head.first<T>(call, call.dw), call.dw.row, own_head.length, own,
                    64 * place.group + 16 * place.warp, place.lane());
      if constexpr (S::kTail > 0) {
        const bool mine = place.group == index % S::kBlocks;
        if (mine) gradient.put_tail();
        fence_async_shared();
        barrier_sync(kAllThreads, S::kThreads);
        if (mine) add_tail<S>(call, Head(call, fresh(index)), gradient, 1.0f / unit);
      }
    }
    barrier_sync(kAllThreads, S::kThreads);  // before anything of this head is written over
    if (S::kStages == 2) {
      stage = 2 * base + S::kStage - stage;
    } else {
      if (next < call.heads) load_head<S>(call, next, stage);
      copy_async_commit();
    }
    index = next;
  }
  copy_async_wait<0>();
}

}  // namespace crate_kernels::mssa
