// Kernels for test_hopper.py: products of warp groups in every layout, a pipeline of tensor maps, products and stores,
// and the faults that the emulator must stop.
#include "../../../csrc/common/cuda/hopper.cuh"
#include "probe.h"

namespace crate_kernels {
namespace {

constexpr int kInner = 64;  // of a product

constexpr int bytes_of(Swizzle swizzle) {
  return swizzle == Swizzle::k128 ? 128 : swizzle == Swizzle::k64 ? 64 : swizzle == Swizzle::k32 ? 32 : 16;
}

// An operand of `rows` rows of M or N and 64 of K, as boxes of a tensor map: K-major [64 of K in panels][rows],
// MN-major [rows in panels][64 of K]; a panel is as wide as the swizzle.
template <Swizzle S, bool MN>
uint64_t panel_descriptor(uint32_t tile, int rows, int kk) {
  constexpr uint32_t kWide = bytes_of(S), kSteps = kWide / 32;  // K-major: products of inner size 16 a panel
  if constexpr (MN) return advance(matrix_descriptor<S>(tile, kInner * kWide, 8 * kWide), 16 * kWide * kk);
  return advance(matrix_descriptor<S>(tile + kk / kSteps * rows * kWide, 0, 8 * kWide), 32 * (kk % kSteps));
}

template <Swizzle S, bool MN>
void load_operand(uint32_t tile, const TensorMap& map, uint32_t barrier, int rows) {
  constexpr int kWide = bytes_of(S) / 2;
  const int panels = (MN ? rows : kInner) / kWide, height = MN ? kInner : rows;
  for (int n = 0; n < panels; ++n) tensor_load(tile + n * height * kWide * 2, map, barrier, n * kWide, 0, 0, 0);
}

// out = a b^T. A from registers if RS: K-major in global memory at `left`.
template <class T, int N, Swizzle S, bool MN_A, bool MN_B, bool RS>
__global__ void product_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const T* left,
                               float* out) {
  const uint32_t base = shared_address(aligned_shared_memory()), other = base + 64 * kInner * 2;
  const uint32_t barrier = other + N * kInner * 2;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier, (RS ? N : 64 + N) * kInner * 2);
    if (!RS) load_operand<S, MN_A>(base, a, barrier, 64);
    load_operand<S, MN_B>(other, b, barrier, N);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = threadIdx.x / 32 * 16 + g;
  float d[N / 2];
  uint32_t registers[4][4];
  for (int kk = 0; RS && kk < 4; ++kk) {
    for (int i = 0; i < 4; ++i) {
      const T* const from = left + (row + i % 2 * 8) * kInner + 16 * kk + 2 * t + i / 2 * 8;
      registers[kk][i] = from[0].bits | static_cast<uint32_t>(from[1].bits) << 16;
    }
  }
  wgmma_fence();
  for (int kk = 0; kk < 4; ++kk) {
    const uint64_t right = panel_descriptor<S, MN_B>(other, N, kk);
    if constexpr (RS) {
      Wgmma<T, N>::template rs<MN_B>(d, registers[kk], right, kk > 0);
    } else {
      Wgmma<T, N>::template ss<MN_A, MN_B>(d, panel_descriptor<S, MN_A>(base, 64, kk), right, kk > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  for (int i = 0; i < N / 2; ++i) out[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = d[i];
}

// The same for operands without swizzle, which threads write: K-major, 8x8 matrices one after another along K, then
// along M or N.
template <class T, int N>
__global__ void plain_kernel(const T* a, const T* b, float* out) {
  const uint32_t base = shared_address(aligned_shared_memory()), other = base + 64 * kInner * 2;
  const auto put = [](uint32_t tile, const T* from, int rows) {
    for (int n = threadIdx.x; n < rows * 8; n += blockDim.x) {
      const int row = n / 8, chunk = n % 8;
      uint4 v;
      memcpy(&v, from + row * kInner + chunk * 8, 16);
      store_shared_4(tile + row / 8 * 1024 + chunk * 128 + row % 8 * 16, v);
    }
  };
  put(base, a, 64);
  put(other, b, N);
  fence_async_shared();
  __syncthreads();
  float d[N / 2];
  wgmma_fence();
  for (int kk = 0; kk < 4; ++kk) {
    Wgmma<T, N>::template ss<false, false>(d, advance(matrix_descriptor<Swizzle::kNone>(base, 128, 1024), 256 * kk),
                                           advance(matrix_descriptor<Swizzle::kNone>(other, 128, 1024), 256 * kk),
                                           kk > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = 0; i < N / 2; ++i) out[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
}

// What a pipeline can get wrong; test_hopper.py names them in this order.
enum Fault {
  kNone,
  kNoProxyFence,        // between the weights' stores and the product that reads them
  kFenceBehindBarrier,  // the fence of each thread only behind the barrier
  kNoBarrier,           // between the weights' stores and the product
  kWeightsTooEarly,     // the next weights are stored while a product may read the last ones
  kSumsTooEarly,        // sums are read before the wait
  kOperandTooEarly,     // registers of an operand change before the wait
  kNoProductFence,      // no wgmma_fence after the wait
  kNoWaitForTile,       // products read a tile that may not have landed
  kWrongParity,         // the parity of a tile's barrier does not change
  kTileFreeTooEarly,    // consumers give a tile back before the wait for its products
  kNoWaitForFree,       // the producer does not wait until a tile is free
  kTooFewBytes,         // the barrier expects less than comes
  kTooManyBytes,        // or more
  kTooManyArrivals,     // a whole warp arrives where one lane is counted
  kNoInitFence,         // behind the initialisation of the barriers
  kNotInitialised,      // a barrier
  kWrongSwizzle,        // in a descriptor
  kWrongStride,
  kWrongMajor,       // it begins elsewhere, in a tile that may not have landed
  kWrongCount,       // of threads, at a named barrier
  kBankConflict,     // weights are stored without swizzle
  kNoStoreFence,     // between the staged sums and the bulk store
  kNoStoreWait,      // the block ends before the store has read
  kStagingTooEarly,  // sums are staged again while the last store may read
  kTooFewReturned,   // the producer gives back fewer registers than the consumers take
  kNoneReturned,     // or none
  kFaults
};

// out[n] = weights of the tile n times the tile, summed: every block of 2 warp groups takes 128 rows of w, and for each
// tile of 64 tokens out of `tiles`, sums += (w_rows w_tile^T, rounded to bf16) w_tile, by a producer warp's copies, in
// two stages; the weights go through shared memory, transposed, which adds them to `column`: column[tile] += E^T
// w_rows.
__global__ void pipeline_kernel(const __grid_constant__ TensorMap map, float* rows_out, float* columns_out, int tiles,
                                int fault) {
  constexpr int kTile = 64 * 128, kOwn = 2 * kTile, kWeights = 2 * kTile, kStaging = 64 * 64 * 4;
  const uint32_t base = shared_address(aligned_shared_memory()), stages = base + kOwn, weights = stages + 2 * kTile;
  const uint32_t staging = weights + 2 * kWeights, full = staging + kStaging, empty = full + 16, ready = empty + 16;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) mbarrier_init(full + 8 * n, 1), mbarrier_init(empty + 8 * n, 8);
    if (fault != kNotInitialised) mbarrier_init(ready, 1);
    if (fault != kNoInitFence) mbarrier_init_fence();
  }
  __syncthreads();
  if (group == 2) {
    if (fault == kTooFewReturned) {
      fewer_registers<32>();
    } else if (fault != kNoneReturned) {
      fewer_registers<24>();
    }
    if (threadIdx.x == 256) {
      mbarrier_expect(ready, kOwn);
      for (int g = 0; g < 2; ++g) tensor_load(base + g * kTile, map, ready, 0, 64 * g, 0, 0);
      for (int n = 0; n < tiles; ++n) {
        const uint32_t own = full + n % 2 * 8;
        if (fault != kNoWaitForFree) mbarrier_wait(empty + n % 2 * 8, n / 2 % 2 ^ 1);
        mbarrier_expect(own, kTile + (fault == kTooFewBytes ? -16 : fault == kTooManyBytes ? 16 : 0));
        tensor_load(stages + n % 2 * kTile, map, own, 0, 64 * n, 0, 0);
      }
    }
    return;
  }
  more_registers<240>();
  float s[32], sums[32], columns[32];
  uint32_t e[4][4];
  for (float& v : sums) v = 0.0f;
  mbarrier_wait(ready, 0);
  for (int n = 0; n < tiles; ++n) {
    const uint32_t tile = stages + n % 2 * kTile, mine = weights + (n % 2) * kWeights;
    if (fault != kNoWaitForTile) mbarrier_wait(full + n % 2 * 8, fault == kWrongParity ? 0 : n / 2 % 2);
    wgmma_fence();
    for (int kk = 0; kk < 4; ++kk) {
      const uint64_t right = fault == kWrongSwizzle ? matrix_descriptor<Swizzle::k64>(tile, 0, 1024)
                                                    : matrix_descriptor(tile, 0, fault == kWrongStride ? 512 : 1024);
      Wgmma<bf16, 64>::ss<false, false>(s, advance(matrix_descriptor(base + group * kTile, 0, 1024), 32 * kk),
                                        advance(right, 32 * kk), kk > 0);
    }
    wgmma_commit();
    if (fault != kSumsTooEarly) wgmma_wait<0>();
    pin(s);
    for (int kk = 0; kk < 4; ++kk) {
      for (int m = 0; m < 4; ++m) e[kk][m] = pack_pair<bf16>(s[8 * kk + 2 * m], s[8 * kk + 2 * m + 1]);
    }
    if (fault == kSumsTooEarly) wgmma_wait<0>();
    const uint32_t to = fault == kWeightsTooEarly ? weights : mine;
    const int row = lane % 8 + lane / 8 % 2 * 8;
    for (int kk = 0; kk < 4; ++kk) {
      const int chunk = 2 * kk + lane / 16;
      store_matrices(
          to + group * kTile + (16 * warp + row) * 128 + (fault == kBankConflict ? chunk : chunk ^ row % 8) * 16,
          e[kk][0], e[kk][1], e[kk][2], e[kk][3]);
    }
    if (fault != kNoProxyFence && fault != kFenceBehindBarrier) fence_async_shared();
    if (fault != kNoBarrier) barrier_sync(1, fault == kWrongCount && group == 1 ? 128 : 256);
    if (fault == kFenceBehindBarrier) fence_async_shared();
    if (fault != kNoProductFence) wgmma_fence();
    for (int kk = 0; kk < 4; ++kk) {
      Wgmma<bf16, 64>::rs<true>(sums, e[kk], advance(matrix_descriptor(tile, 0, 1024), 2048 * kk), true);
    }
    for (int kk = 0; kk < 8 && group == 0; ++kk) {  // 128 rows: those of both groups
      const uint64_t left = advance(matrix_descriptor(to, 0, 1024), 2048 * kk);
      const uint64_t right = advance(matrix_descriptor(base, 0, 1024), 2048 * kk);
      if (fault == kWrongMajor) {
        Wgmma<bf16, 64>::ss<true, false>(columns, left, right, kk > 0);
      } else {
        Wgmma<bf16, 64>::ss<true, true>(columns, left, right, kk > 0);
      }
    }
    wgmma_commit();
    if (fault == kOperandTooEarly) e[0][0] += 1;
    if (lane == 0 && fault == kTileFreeTooEarly) mbarrier_arrive(empty + n % 2 * 8);
    wgmma_wait<0>();
    pin(sums);
    if ((lane == 0 || fault == kTooManyArrivals) && fault != kTileFreeTooEarly) mbarrier_arrive(empty + n % 2 * 8);
    if (group == 0) {
      pin(columns);
      if (n > 0 && threadIdx.x == 0 && fault != kStagingTooEarly) bulk_wait_read<0>();
      barrier_sync(2, 128);
      for (int i = 0; i < 32; i += 2) {
        const int at = (16 * warp + lane / 4 + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2;
        store_shared(staging + at * 4, columns[i]);
        store_shared(staging + at * 4 + 4, columns[i + 1]);
      }
      if (fault != kNoStoreFence) fence_async_shared();
      barrier_sync(2, 128);
      if (threadIdx.x == 0) {
        bulk_add(columns_out + n * 64 * 64, staging, kStaging);
        bulk_commit();
      }
    }
  }
  if (threadIdx.x == 0 && fault != kNoStoreWait) bulk_wait_read<0>();
  for (int i = 0; i < 32; ++i) {
    rows_out[(64 * group + 16 * warp + lane / 4 + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
  }
}

// out = in, 64 numbers a block, as a bulk copy of so many bytes brings them, `skipped` bytes further on.
__global__ void bulk_kernel(const char* in, float* out, int bytes, int skipped, bool waits) {
  const uint32_t base = shared_address(aligned_shared_memory()), barrier = base + 256;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier, 256);
    bulk_load(base, in + 256 * blockIdx.x + skipped, bytes, barrier);
  }
  __syncthreads();
  if (waits) mbarrier_wait(barrier, 0);
  for (int n = static_cast<int>(threadIdx.x); n < 64; n += 32) out[64 * blockIdx.x + n] = load_shared(base + 4 * n);
}

TensorMap tensor_map(const Tensor& t, int columns, int rows, Swizzle swizzle) {
  emulated::Map map = {};
  map.base = static_cast<const unsigned char*>(t.data_ptr());
  map.element = 2;
  map.swizzle = static_cast<int32_t>(swizzle);
  for (int d = 0; d < 4; ++d) map.sizes[d] = map.box[d] = 1;
  map.sizes[0] = static_cast<int32_t>(t.size(1)), map.sizes[1] = static_cast<int32_t>(t.size(0));
  map.strides[0] = 2, map.strides[1] = 2 * t.stride(0);
  map.box[0] = columns, map.box[1] = rows;
  TensorMap bytes = {};
  memcpy(&bytes, &map, sizeof map);
  return bytes;
}

template <class T, int N, Swizzle S>
void product(Tensor a, Tensor b, bool mn_a, bool mn_b, bool rs, Tensor out) {
  const int wide = bytes_of(S) / 2;
  const TensorMap left = tensor_map(a, wide, kInner, S), right = tensor_map(b, wide, mn_b ? kInner : N, S);
  const emulator::Launch where = {1, 128, (64 + N) * kInner * 2 + 16};
  float* const to = static_cast<float*>(out.data_ptr());
  const T* const from = static_cast<const T*>(a.data_ptr());
  if (rs && mn_b) return launch<product_kernel<T, N, S, false, true, true>>(where, left, right, from, to);
  if (rs) return launch<product_kernel<T, N, S, false, false, true>>(where, left, right, from, to);
  if (mn_a && mn_b) return launch<product_kernel<T, N, S, true, true, false>>(where, left, right, from, to);
  if (mn_a) return launch<product_kernel<T, N, S, true, false, false>>(where, left, right, from, to);
  if (mn_b) return launch<product_kernel<T, N, S, false, true, false>>(where, left, right, from, to);
  launch<product_kernel<T, N, S, false, false, false>>(where, left, right, from, to);
}

// a: (64, 64), b: (N, 64), or their transposes if mn.
template <class T, int N>
void product_of(Tensor a, Tensor b, int64_t swizzle, bool mn_a, bool mn_b, bool rs, Tensor out) {
  switch (static_cast<Swizzle>(swizzle)) {
    case Swizzle::k128:
      return product<T, N, Swizzle::k128>(a, b, mn_a, mn_b, rs, out);
    case Swizzle::k64:
      return product<T, N, Swizzle::k64>(a, b, mn_a, mn_b, rs, out);
    case Swizzle::k32:
      return product<T, N, Swizzle::k32>(a, b, mn_a, mn_b, rs, out);
    case Swizzle::kNone:
      return launch<plain_kernel<T, N>>({1, 128, (64 + N) * kInner * 2}, static_cast<const T*>(a.data_ptr()),
                                        static_cast<const T*>(b.data_ptr()), static_cast<float*>(out.data_ptr()));
  }
}

void warp_group_product(Tensor a, Tensor b, int64_t swizzle, bool mn_a, bool mn_b, bool rs, Tensor out) {
  with_half(a, [&](auto zero) {
    using T = decltype(zero);
    if (out.size(1) == 64) return product_of<T, 64>(a, b, swizzle, mn_a, mn_b, rs, out);
    product_of<T, 128>(a, b, swizzle, mn_a, mn_b, rs, out);
  });
}

void pipeline(Tensor w, Tensor rows, Tensor columns, int64_t fault) {
  const int tiles = static_cast<int>(w.size(0) / 64);
  launch<pipeline_kernel>({1, 384, 10 * 64 * 128 + 64 * 64 * 4 + 64}, tensor_map(w, 64, 64, Swizzle::k128),
                          static_cast<float*>(rows.data_ptr()), static_cast<float*>(columns.data_ptr()), tiles,
                          static_cast<int>(fault));
}

void bulk(Tensor in, Tensor out, int64_t bytes, int64_t skipped, bool waits, int64_t cluster) {
  launch<bulk_kernel>({out.numel() / 64, 32, 272, static_cast<int>(cluster)}, static_cast<const char*>(in.data_ptr()),
                      static_cast<float*>(out.data_ptr()), static_cast<int>(bytes), static_cast<int>(skipped), waits);
}

// The descriptors of the products of inner size 16 of an operand of so many rows at address 0.
template <Swizzle S>
void descriptors_of(Tensor out, bool mn, int64_t rows) {
  int64_t* const to = static_cast<int64_t*>(out.data_ptr());
  for (int kk = 0; kk < out.numel(); ++kk) {
    to[kk] = static_cast<int64_t>(mn ? panel_descriptor<S, true>(0, static_cast<int>(rows), kk)
                                     : panel_descriptor<S, false>(0, static_cast<int>(rows), kk));
  }
}

void descriptors(Tensor out, int64_t swizzle, bool mn, int64_t rows) {
  switch (static_cast<Swizzle>(swizzle)) {
    case Swizzle::k128:
      return descriptors_of<Swizzle::k128>(out, mn, rows);
    case Swizzle::k64:
      return descriptors_of<Swizzle::k64>(out, mn, rows);
    case Swizzle::k32:
      return descriptors_of<Swizzle::k32>(out, mn, rows);
    case Swizzle::kNone:
      return;
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("probe_descriptors(Tensor(a!) out, int swizzle, bool mn, int rows) -> ()");
  m.def("probe_warp_group(Tensor a, Tensor b, int swizzle, bool mn_a, bool mn_b, bool rs, Tensor(a!) out) -> ()");
  m.def("probe_bulk(Tensor source, Tensor(a!) out, int bytes, int skipped, bool waits, int cluster) -> ()");
  m.def("probe_pipeline(Tensor w, Tensor(a!) rows, Tensor(b!) columns, int fault) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, m) {
  m.impl("probe_descriptors", TORCH_BOX(&descriptors));
  m.impl("probe_warp_group", TORCH_BOX(&warp_group_product));
  m.impl("probe_bulk", TORCH_BOX(&bulk));
  m.impl("probe_pipeline", TORCH_BOX(&pipeline));
}

}  // namespace crate_kernels
