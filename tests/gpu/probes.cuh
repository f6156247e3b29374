// Kernels of probes.py that say what sm_90a computes, bit by bit; the emulator runs them too.
#pragma once

#include "../../csrc/common/cuda/hopper.cuh"

namespace crate_kernels::probe {

constexpr int kInner = 64;  // of a product

// An operand in shared memory: `rows` rows of M or N and kInner of K, in panels as wide as the swizzle. K-major a panel
// has [rows][bytes of K], MN-major [kInner][bytes of M or N]. Without swizzle a panel is 16 bytes wide.
struct Operand {
  uint32_t tile;
  int rows, swizzle;
  bool mn;

  CRATE_DEVICE int wide() const { return swizzle == 0 ? 16 : 256 >> swizzle; }

  template <class T>
  CRATE_DEVICE void store(const T* from) const {
    for (int n = threadIdx.x; n < rows * kInner / 8; n += blockDim.x) {
      const int line = mn ? n % kInner : n % rows, byte = 16 * (mn ? n / kInner : n / rows);
      const int first = mn ? byte / 2 * kInner + line : line * kInner + byte / 2;
      uint32_t pairs[4];
      for (int i = 0; i < 4; ++i) {
        const T *const low = from + first + 2 * i * (mn ? kInner : 1), *const high = low + (mn ? kInner : 1);
        pairs[i] = low->bits | static_cast<uint32_t>(high->bits) << 16;
      }
      const uint32_t address = tile + byte / wide() * ((mn ? kInner : rows) * wide()) + line * wide() + byte % wide();
      store_shared_4(address ^ (address >> 7 & (wide() / 16 - 1)) << 4,
                     make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
  }

  // The descriptor of the rows 16 kk to 16 kk + 15 of K. `leading` counts only where it is not `unused`.
  CRATE_DEVICE uint64_t descriptor(int kk, int unused) const {
    const int panel = (mn ? kInner : rows) * wide(), byte = 32 * kk;
    const uint32_t address = tile + (mn ? 16 * wide() * kk : byte / wide() * panel + byte % wide());
    const int leading = mn || swizzle == 0 ? panel : unused;
    return matrix_descriptor<Swizzle::kNone>(address, leading, 8 * wide()) | static_cast<uint64_t>(swizzle) << 62;
  }
};

template <class T, int N, bool MN_A, bool MN_B, bool RS>
CRATE_DEVICE void multiply(float (&d)[N / 2], const uint32_t (&registers)[4][4], const uint64_t (&left)[4],
                           const uint64_t (&right)[4]) {
  wgmma_fence();
  unroll<4>([&](int kk) {
    if constexpr (RS) {
      Wgmma<T, N>::template rs<MN_B>(d, registers[kk], right[kk], kk > 0);
    } else {
      Wgmma<T, N>::template ss<MN_A, MN_B>(d, left[kk], right[kk], kk > 0);
    }
  });
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
}

enum Form { kMnA = 1, kMnB = 2, kRegistersA = 4 };

// out = a b^T; a: (64, 64), b: (N, 64). `unused` is in the bits of a K-major descriptor that no swizzle reads.
template <class T, int N>
__global__ void product_kernel(const T* a, const T* b, float* out, int swizzle, int form, int unused) {
  const uint32_t base = shared_address(aligned_shared_memory());
  const Operand left = {base, 64, swizzle, (form & kMnA) != 0};
  const Operand right = {base + 64 * kInner * 2, N, swizzle, (form & kMnB) != 0};
  left.store(a);
  right.store(b);
  fence_async_shared();
  __syncthreads();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  uint64_t lefts[4], rights[4];
  uint32_t r[4][4];
  float d[N / 2];
  for (int kk = 0; kk < 4; ++kk) {
    lefts[kk] = left.descriptor(kk, unused), rights[kk] = right.descriptor(kk, unused);
    for (int i = 0; i < 4; ++i) {
      const T* const from = a + (row + i % 2 * 8) * kInner + 16 * kk + column + i / 2 * 8;
      r[kk][i] = from[0].bits | static_cast<uint32_t>(from[1].bits) << 16;
    }
  }
  switch (form) {
    case 0:
      multiply<T, N, false, false, false>(d, r, lefts, rights);
      break;
    case kMnA:
      multiply<T, N, true, false, false>(d, r, lefts, rights);
      break;
    case kMnB:
      multiply<T, N, false, true, false>(d, r, lefts, rights);
      break;
    case kMnA | kMnB:
      multiply<T, N, true, true, false>(d, r, lefts, rights);
      break;
    case kRegistersA:
      multiply<T, N, false, false, true>(d, r, lefts, rights);
      break;
    default:
      multiply<T, N, false, true, true>(d, r, lefts, rights);
  }
  for (int i = 0; i < N / 2; ++i) out[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2] = d[i];
}

// Four 8x8 matrices of 16 bits, by a warp. out: the registers of ldmatrix, what stmatrix stores of them, and what its
// transposed form stores.
__global__ void matrices_kernel(const uint4* in, uint4* out) {
  const uint32_t base = shared_address(aligned_shared_memory()), row = 16 * threadIdx.x;
  store_shared_4(base + row, in[threadIdx.x]);
  __syncthreads();
  uint32_t r[4];
  load_matrices(r, base + row);
  out[threadIdx.x] = make_uint4(r[0], r[1], r[2], r[3]);
  store_matrices(base + 512 + row, r[0], r[1], r[2], r[3]);
  store_matrices_transposed(base + 1024 + row, r[0], r[1], r[2], r[3]);
  __syncthreads();
  out[32 + threadIdx.x] = load_shared_4(base + 512 + row);
  out[64 + threadIdx.x] = load_shared_4(base + 1024 + row);
}

// out: 2^x, 1 / x, log2 x, and the bits of x and -x in bf16, in fp16, and of 1 + x^2 in bf16, in fp16.
__global__ void numbers_kernel(const float* in, float* out, int count) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= count) return;
  const float x = in[n];
  uint32_t wide = pack_pair<bf16>(1.0f, 1.0f), narrow = pack_pair<fp16>(1.0f, 1.0f);
  add_squares<bf16>(wide, pack_pair<bf16>(x, -x));
  add_squares<fp16>(narrow, pack_pair<fp16>(x, -x));
  out[n] = exp2_fast(x), out[count + n] = inverse_fast(x), out[2 * count + n] = log2_fast(x);
  out[3 * count + n] = __uint_as_float(pack_pair<bf16>(x, -x));
  out[4 * count + n] = __uint_as_float(pack_pair<fp16>(x, -x));
  out[5 * count + n] = __uint_as_float(wide), out[6 * count + n] = __uint_as_float(narrow);
}

// By a warp: sums += in, 128 numbers, by bulk copies in two phases of one barrier and a bulk sum; and sums of what all
// lanes add to four numbers behind them.
__global__ void copies_kernel(const float* in, float* sums) {
  const uint32_t base = shared_address(aligned_shared_memory()), barrier = base + 512;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int phase = 0; phase < 2; ++phase) {
    if (threadIdx.x == 0) {
      mbarrier_expect(barrier, 256);
      bulk_load(base + 256 * phase, in + 64 * phase, 256, barrier);
    }
    mbarrier_wait(barrier, phase);
  }
  if (threadIdx.x == 0) {
    bulk_add(sums, base, 512);
    bulk_commit();
    bulk_wait_read<0>();
  }
  const float lane = static_cast<float>(threadIdx.x);
  add_global_4(sums + 128, 1.0f, lane, -lane, 0.5f);
}

// Four numbers for each of `times` places, one after another, by all blocks, stored or added; `mask` + 1, a power of 2,
// places.
template <bool ADDS>
__global__ void rate_kernel(float* to, int64_t times, int64_t mask) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < times; n += step) {
    float* const at = to + 4 * (n & mask);
    if constexpr (ADDS) {
      add_global_4(at, 1.0f, 2.0f, 3.0f, 4.0f);
    } else {
      *reinterpret_cast<float4*>(at) = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
    }
  }
}

}  // namespace crate_kernels::probe
