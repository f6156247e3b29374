// The forward of whole heads on sm_90a: every token of a head is in shared memory, which is read and written once.
// head_output.cuh has the equations, and the products.
#pragma once

#include "head_output.cuh"

namespace crate_kernels::mssa {

// Writes half the score of every token with itself, in bits, and which tokens are keys. Writes the largest norm of each
// warp's keys; causal, of each 32 tokens', and beside every norm the largest of the keys up to it in its 32.
template <class S>
CRATE_DEVICE void write_norms(const HeadCall& call, const Head& head, uint32_t base, uint32_t w) {
  using T = typename S::T;
  const uint8_t* const key_mask = head.key_mask(call);
  float maximum = -INFINITY;
#pragma unroll 1
  for (int first = 0; first < S::kRows; first += S::kThreads) {
    const int row = first + fresh(threadIdx.x);
    const bool is_key = row < head.length && (key_mask == nullptr || key_mask[row]);
    const uint32_t keys = __ballot_sync(kAllLanes, is_key);
    if (row % 32 == 0) store_shared(base + S::kKeys + row / 8, __uint_as_float(keys));
    if (!S::kCausal && row >= S::kRows) continue;
    uint32_t sums[4] = {};  // of squares, rounded: a shift tolerates that
#pragma unroll
    for (int chunk = 0; chunk < S::kDim / 8; ++chunk) {
      const uint4 bits =
          load_shared_4(w + chunk / 8 * S::kPanel + chunk_at(S::kCausal ? min(row, S::kRows - 1) : row, chunk % 8));
      add_squares<T>(sums[0], bits.x), add_squares<T>(sums[1], bits.y);
      add_squares<T>(sums[2], bits.z), add_squares<T>(sums[3], bits.w);
    }
    float squares = 0.0f;
    unroll<4>([&](int i) {
      const float2 pair = unpack_pair<T>(sums[i]);
      squares += pair.x + pair.y;
    });
    const float norm = 0.5f * call.factor * squares;
    if constexpr (S::kCausal) {
      float up_to = is_key ? norm : -INFINITY;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float before = __shfl_up_sync(kAllLanes, up_to, step);
        if (row % 32 >= step) up_to = fmaxf(up_to, before);
      }
      if (row % 32 == 31) store_shared(base + S::kNumbers + row / 32 * 4, up_to);
      if (row < S::kRows) store_shared(base + S::kSums + 4 * row, up_to);
    }
    if (row < S::kRows) store_shared(base + S::kNorms + 4 * row, norm);
    if (is_key) maximum = fmaxf(maximum, norm);
  }
  if constexpr (!S::kCausal) {
    maximum = warp_max(maximum);
    if (threadIdx.x % 32 == 0) store_shared(base + S::kNumbers + threadIdx.x / 8, maximum);
  }
}

// Adds to every norm the largest of the keys up to it: then no row's number depends on later tokens.
template <class S>
CRATE_DEVICE void add_largest(uint32_t base) {
#pragma unroll 1
  for (int row = fresh(threadIdx.x); row < S::kRows; row += S::kThreads) {
    float maximum = load_shared(base + S::kSums + 4 * row);
    for (int n = 0; n < row / 32; ++n) maximum = fmaxf(maximum, load_shared(base + S::kNumbers + 4 * n));
    const uint32_t at = base + S::kNorms + 4 * row;
    store_shared(at, load_shared(at) + maximum);
  }
}

// Notes a row that is out of range: its head is left, causal from this row on.
template <class S>
CRATE_DEVICE void leave(const HeadCall& call, int index, int row, int length) {
  atomicMax(call.left + index, S::kCausal ? length - row : length);
}

// out of 64 rows from `first` on, and their lse.
template <class S>
CRATE_DEVICE void finish_rows(const HeadCall& call, int index, const HeadOutput<S>& output, int first) {
  const HeadPlace at = output.at;
  const int lane = at.lane(), own = first + 16 * at.warp;
  float inverse[2];  // of the thread's two rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float exact = output.exact[half];
    exact += __shfl_xor_sync(kAllLanes, exact, 1);
    exact += __shfl_xor_sync(kAllLanes, exact, 2);
    const float total = output.sum[2 * half];
    const bool any = output.shift[half] != -INFINITY;
    inverse[half] = any ? inverse_fast(total) : 0.0f;
    const int row = own + (lane >> 2) + 8 * half;
    if ((lane & 3) == 0 && row < output.length) {
      const float lse = any ? output.lse_of(exact, output.shift[half]) : -INFINITY;
      output.lse()[row] = lse;
      if (any && !ForwardRange<typename S::T>::holds(total, lse)) leave<S>(call, index, row, output.length);
    }
  }
  const uint32_t staging = at.base + S::kStagingAt + at.warp * S::kPanels * 16 * kRowBytes;
  __syncwarp();  // the rows before these have been read
  stage_rows<typename S::T, S::kDim>(staging, output.acc, inverse[0], inverse[1], lane);
  __syncwarp();
  store_rows<S>(call, output.out(), call.out.row, output.length, staging, own, lane);
}

// out of the tail's rows, made as channels times tokens, and their lse.
template <class S>
CRATE_DEVICE void finish_tail(const HeadCall& call, int index, const HeadOutput<S>& output) {
  using T = typename S::T;
  const HeadPlace at = output.at;
  const uint32_t one = pack_pair<T>(1.0f, 1.0f), columns = at.base + S::kColumnsAt;
  uint32_t ones[4] = {one, one, one, one};                    // (64, 16) per warp group
  float sums[S::kPanels][S::kTail / 2], total[S::kTail / 2];  // (64 kPanels channels, kTail rows), (64, kTail)
  wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
#pragma unroll
    for (int kk = 0; kk < S::kRows / 16; ++kk) {
      const uint64_t channels = matrix_descriptor(output.w + panel * S::kPanel, 0, 1024);
      Wgmma<T, S::kTail>::template ss<true, true>(sums[panel], advance(channels, 2048 * kk),
                                                  Columns<S::kTail>::descriptor(columns, 16 * kk), kk > 0);
    }
  }
#pragma unroll
  for (int kk = 0; kk < S::kRows / 16; ++kk) {
    Wgmma<T, S::kTail>::template rs<true>(total, ones, Columns<S::kTail>::descriptor(columns, 16 * kk), kk > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(total), pin(ones);
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) pin(sums[panel]);
  float inverse[S::kTail / 4];  // (kTail,) per quad: of the thread's rows of the tail
  const int lane = at.lane();
#pragma unroll
  for (int i = 0; i < S::kTail / 4; ++i) {
    const float rounded = total[i / 2 * 4 + i % 2];
    const int column = i / 2 * 8 + (lane & 3) * 2 + i % 2, row = 64 * S::kBlocks + column;
    const float shift = load_shared(at.base + S::kNorms + 4 * row) + output.raise;
    const bool any = shift != -INFINITY;
    inverse[i] = any ? inverse_fast(rounded) : 0.0f;
    if (at.warp == 0 && lane < 4 && row < output.length) {
      float exact = 0.0f;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) exact += load_shared(at.base + S::kSums + 256 * warp + 4 * column);
      const float lse = any ? output.lse_of(exact, shift) : -INFINITY;
      output.lse()[row] = lse;
      if (any && !ForwardRange<T>::holds(rounded, lse)) leave<S>(call, index, row, output.length);
    }
  }
  const uint32_t staging = at.base + S::kStagingAt;
#pragma unroll
  for (int panel = 0; panel < S::kPanels; ++panel) {
#pragma unroll
    for (int kk = 0; kk < S::kTail / 16; ++kk) {
      const int token = 16 * kk + (lane >> 4) * 8 + (lane & 7), chunk = 2 * at.warp + (lane >> 3 & 1);
      const float *const x = &sums[panel][8 * kk], *const by = &inverse[4 * kk];
      store_matrices_transposed(staging + panel * S::kTail * kRowBytes + chunk_at(token, chunk),
                                pack_pair<T>(x[0] * by[0], x[1] * by[1]), pack_pair<T>(x[2] * by[0], x[3] * by[1]),
                                pack_pair<T>(x[4] * by[2], x[5] * by[3]), pack_pair<T>(x[6] * by[2], x[7] * by[3]));
    }
  }
  __syncthreads();
  const int id = fresh(threadIdx.x), chunk = id & 7;
  T* const to = output.out() + 8 * chunk;
#pragma unroll
  for (int first = 0; first < S::kTail; first += S::kThreads / 8) {
    const int token = first + (id >> 3), row = 64 * S::kBlocks + token;
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      if (row < output.length && 64 * panel + 8 * chunk < call.head_dim) {
        *reinterpret_cast<uint4*>(to + row * call.out.row + 64 * panel) =
            load_shared_4(staging + panel * S::kTail * kRowBytes + chunk_at(token, chunk));
      }
    }
  }
}

// out of the 64 rows from `first` on. Causal, each 64 have separate code: this is for FIRST and those behind it.
template <int FIRST, class S>
CRATE_DEVICE void attend(const HeadCall& call, int index, HeadOutput<S>& output, int first) {
  if (!S::kCausal || first == FIRST) {
    output.template attend<FIRST>(first + 16 * output.at.warp);
    finish_rows<S>(call, index, output, first);
  } else if constexpr (S::kCausal && FIRST + 64 < 64 * S::kBlocks) {
    attend<FIRST + 64>(call, index, output, first);
  }
}

template <class T, int DIM, int ROWS, bool CAUSAL>
__global__ void __launch_bounds__(128, HeadForwardShape<T, DIM, ROWS, CAUSAL>::kBeside)
    head_forward_kernel(const __grid_constant__ HeadCall call) {
  using S = HeadForwardShape<T, DIM, ROWS, CAUSAL>;
  const uint32_t base = shared_address(aligned_shared_memory());
  const HeadPlace place = {base, 0, __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x >> 5), 0)};
  if (threadIdx.x < 64) store_shared(base + S::kOnes + 4 * threadIdx.x, __uint_as_float(pack_pair<T>(1.0f, 1.0f)));
  int index = blockIdx.x;
  uint32_t stage = base;
  const auto load = [&](int which, uint32_t to) {
    if (which < call.heads) {
      const Head head(call, which);
      load_tokens<S, S::kRows>(call, head, call.w, to);
    }
    copy_async_commit();
  };
  load(index, stage);
#pragma unroll 1
  while (index < call.heads) {
    if (threadIdx.x == 0) call.left[index] = 0;
    copy_async_wait<0>();
    fence_async_shared();
    __syncthreads();
    if (S::kStages == 2) load(index + gridDim.x, 2 * base + S::kStage - stage);
    const Head head(call, index);
    write_norms<S>(call, head, base, stage);
    if (threadIdx.x == 0) {
      const uint64_t out = head.offset(call, call.out), lse = head.row;
      store_shared_4(base + S::kPlaces, {static_cast<uint32_t>(out), static_cast<uint32_t>(out >> 32),
                                         static_cast<uint32_t>(lse), static_cast<uint32_t>(lse >> 32)});
    }
    __syncthreads();
    float raise = -S::kTop;
    if constexpr (S::kCausal) {
      add_largest<S>(base);
      __syncthreads();
    } else {
      float maximum = -INFINITY;
#pragma unroll
      for (int n = 0; n < 4; ++n) maximum = fmaxf(maximum, load_shared(base + S::kNumbers + 4 * n));
      raise += maximum;
    }
    HeadOutput<S> output = {call, place, stage, head.length, raise, {}, {}, {}, {}, {}, {}};
#pragma unroll 1
    for (int first = 0; first < 64 * S::kBlocks; first += 64) {
      if (first >= head.length) break;
      attend<0>(call, index, output, first);
    }
    if constexpr (S::kTail > 0) {
      if (head.length > 64 * S::kBlocks) {
        output.take_rows(S::kRows - 64 + 16 * place.warp);
        output.template put_tail<0>();
        output.put_sums();
        fence_async_shared();
        __syncthreads();
        finish_tail<S>(call, index, output);
      }
    }
    if (S::kStages == 2) {
      stage = 2 * base + S::kStage - stage;
    } else {
      __syncthreads();  // before this head's tokens are written over
      load(index + gridDim.x, stage);
    }
    index += gridDim.x;
  }
  copy_async_wait<0>();
}

}  // namespace crate_kernels::mssa
