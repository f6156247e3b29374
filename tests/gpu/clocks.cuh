// Kernels of probes.py that time instructions of sm_90a by the clock of one multiprocessor.
#pragma once

#include "../../csrc/common/cuda/hopper.cuh"

namespace crate_kernels::probe {

// Instructions of the two timed runs. What begins and ends a run is in both, so that their difference is without it.
constexpr int kFew = 8, kMany = 40, kRounds = 6;

// CHAINS numbers, each made of itself: one has the latency of an instruction, several have its interval of issue.
template <int CHAINS, bool POWER>
struct Arithmetic {
  float x[CHAINS];

  CRATE_DEVICE explicit Arithmetic(uint32_t) {
    unroll<CHAINS>([&](int i) { x[i] = 0.25f * static_cast<float>(threadIdx.x + i); });
  }
  template <int N>
  CRATE_DEVICE void run() {
    unroll<N>([&](int i) {
      float& own = x[i % CHAINS];
      if constexpr (POWER) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(own));
      } else {
        asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(own));
      }
    });
  }
  CRATE_DEVICE float result() const {
    float sum = 0.0f;
    unroll<CHAINS>([&](int i) { sum += x[i]; });
    return sum;
  }
};

template <int CHAINS>
using Power = Arithmetic<CHAINS, true>;
template <int CHAINS>
using Fma = Arithmetic<CHAINS, false>;

// Products of a warp group with N columns, into CHAINS interleaved sums; A from registers if RS.
template <int N, int CHAINS, bool RS>
struct Product {
  float d[CHAINS][N / 2];
  uint32_t a[4];
  uint64_t left, right;

  CRATE_DEVICE explicit Product(uint32_t base)
      : left(matrix_descriptor(base, 0, 1024)), right(matrix_descriptor(base + 64 * 128, 0, 1024)) {
    const uint4 zeros = load_shared_4(base);
    a[0] = zeros.x, a[1] = zeros.y, a[2] = zeros.z, a[3] = zeros.w;
  }
  template <int COUNT>
  CRATE_DEVICE void run() {
    wgmma_fence();
    unroll<COUNT>([&](int i) {
      const uint64_t b = advance(right, 32 * (i % 4));
      if constexpr (RS) {
        Wgmma<bf16, N>::template rs<false>(d[i % CHAINS], a, b, i >= CHAINS);
      } else {
        Wgmma<bf16, N>::template ss<false, false>(d[i % CHAINS], advance(left, 32 * (i % 4)), b, i >= CHAINS);
      }
    });
    wgmma_commit();
    wgmma_wait<0>();
    unroll<CHAINS>([&](int i) { pin(d[i]); });
  }
  CRATE_DEVICE float result() const {
    float sum = 0.0f;
    unroll<CHAINS>([&](int i) { sum += d[i][0]; });
    return sum;
  }
};

// Four matrices of a warp from shared memory. Each load has separate registers: none waits for another.
struct Load {
  uint32_t address, r[kMany][4] = {};

  CRATE_DEVICE explicit Load(uint32_t base) : address(base + 16 * (threadIdx.x % 32)) {}
  template <int N>
  CRATE_DEVICE void run() {
    unroll<N>([&](int i) { load_matrices(r[i], address + 512 * i); });
  }
  CRATE_DEVICE float result() const {
    uint32_t bits = 0;
    unroll<kMany>([&](int i) { bits |= r[i][0] | r[i][1] | r[i][2] | r[i][3]; });
    return __uint_as_float(bits);
  }
};

// And to shared memory: a load behind them waits for all.
struct Store {
  uint32_t address, zero;

  CRATE_DEVICE explicit Store(uint32_t base) : address(base + 16 * (threadIdx.x % 32)) {
    zero = load_shared_4(address).x;
  }
  template <int N>
  CRATE_DEVICE void run() {
    unroll<N>([&](int i) { store_matrices(address + 512 * i, zero, zero, zero, zero); });
  }
  CRATE_DEVICE float result() const { return load_shared(address); }
};

struct Barrier {
  CRATE_DEVICE explicit Barrier(uint32_t) {}
  template <int N>
  CRATE_DEVICE void run() {
    const int threads = static_cast<int>(blockDim.x);
    unroll<N>([&](int) { barrier_sync(1, threads); });
  }
  CRATE_DEVICE float result() const { return 0.0f; }
};

// A wait for a phase that has ended, or, if ARRIVES, an arrival of every thread and the wait for all.
template <bool ARRIVES>
struct Phase {
  uint32_t barrier, parity = ARRIVES ? 0 : 1;

  CRATE_DEVICE explicit Phase(uint32_t base) : barrier(base) {
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, static_cast<int>(blockDim.x));
      mbarrier_init_fence();
    }
    __syncthreads();
  }
  template <int N>
  CRATE_DEVICE void run() {
    unroll<N>([&](int) {
      if (ARRIVES) mbarrier_arrive(barrier);
      mbarrier_wait(barrier, parity);
      if (ARRIVES) parity ^= 1;
    });
  }
  CRATE_DEVICE float result() const { return 0.0f; }
};

// clocks[round]: of kFew instructions of each warp, and of kMany. The first round fills the instruction cache.
template <class What>
__global__ void clocks_kernel(int64_t* clocks) {
  constexpr int kBytes = 24 * 1024;
  const uint32_t base = shared_address(aligned_shared_memory()), results = base + kBytes + 4 * threadIdx.x;
  for (int n = threadIdx.x; n < kBytes / 16; n += blockDim.x) store_shared_4(base + 16 * n, make_uint4(0, 0, 0, 0));
  fence_async_shared();
  __syncthreads();
  What what(base);
  const auto run = [&](auto count) {
    what.template run<count>();
    store_shared(results, what.result());  // waits for it
    __syncthreads();
  };
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    run(std::integral_constant<int, kFew>());  // makes what both timed runs begin with
    const int64_t start = clock64();
    run(std::integral_constant<int, kFew>());
    const int64_t middle = clock64();
    run(std::integral_constant<int, kMany>());
    const int64_t stop = clock64();
    if (threadIdx.x == 0) clocks[2 * round] = middle - start, clocks[2 * round + 1] = stop - middle;
  }
}

}  // namespace crate_kernels::probe
