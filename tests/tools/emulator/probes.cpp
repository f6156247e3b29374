// Kernels for the emulator's tests: barriers, shuffles and memory that it must emulate, and faults that it must stop.
#include "../../../csrc/common/cuda/grid.cuh"
#include "../../../csrc/common/cuda/philox.cuh"
#include "probe.h"

namespace crate_kernels {
namespace {

// out[i] = the sum of the block's values (by shared memory, by warps, by the whole block), and a vote.
__global__ void sums_kernel(const float* in, float* out) {
  float* const shared = reinterpret_cast<float*>(shared_memory());
  const unsigned i = threadIdx.x, n = blockDim.x;
  const float v = in[blockIdx.x * n + i];
  shared[i] = v;
  __syncthreads();
  float total = 0.0f;
  for (unsigned k = 0; k < n; ++k) total += shared[(i + k) % n];
  __syncthreads();
  float* const to = out + (blockIdx.x * n + i) * 5;
  to[0] = total;
  to[1] = warp_sum(v);
  to[2] = warp_max(v);
  to[3] = block_sum(v, shared);
  to[4] = static_cast<float>(__syncthreads_count(v > 0.0f) * 100 + __syncthreads_count(v > 1.0f));
}

// out[i] = the lanes' values after each shuffle.
__global__ void shuffles_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int* const to = out + lane * 7;
  to[0] = __shfl_sync(kAllLanes, lane, 5);
  to[1] = __shfl_xor_sync(kAllLanes, lane, 3);
  to[2] = __shfl_up_sync(kAllLanes, lane, 2);
  to[3] = __shfl_down_sync(kAllLanes, lane, 2);
  to[4] = __shfl_sync(kAllLanes, lane, 1, 8);
  to[5] = __shfl_down_sync(kAllLanes, lane, 3, 4);
  to[6] = static_cast<int>(__ballot_sync(kAllLanes, lane % 3 == 0));
}

// A sum of values that other threads wrote. `barrier` false: without the barrier that it needs.
__global__ void neighbours_kernel(float* out, bool barrier) {
  float* const shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = 1.0f;
  if (barrier) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

enum Fault { kNone, kBeyond, kBefore, kDivergentBarrier, kDivergentWarp, kEarlyReturn, kStack, kTrap, kMisaligned };

__attribute__((noinline)) float deep(int n, volatile float* at) {
  volatile float local[4096];
  local[n % 4096] = *at;
  return n == 0 ? local[0] : deep(n - 1, &local[n % 4096]) + local[(n + 1) % 4096];
}

__global__ void fault_kernel(float* out, int fault, int64_t bytes) {
  unsigned char* const shared = shared_memory();
  if (fault == kBeyond) shared[bytes + 15] = 1;
  if (fault == kBefore) shared[-1] = 1;
  if (fault == kDivergentBarrier && threadIdx.x == 0) return;  // legal: the barrier then waits for the others only
  if (fault == kDivergentBarrier && threadIdx.x < 40) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  if (fault == kDivergentWarp) {
    if (threadIdx.x % 2 == 0) {
      __syncwarp();
    } else {
      out[0] = __shfl_sync(kAllLanes, 1.0f, 0);
    }
  }
  if (fault == kEarlyReturn && threadIdx.x == 1) return;
  if (fault == kStack) out[0] = deep(1000, out);
  if (fault == kTrap) __trap();
  if (fault == kMisaligned) out[0] = load_pack(out + 1).at[0];
  out[threadIdx.x] = warp_sum(1.0f);
}

__global__ void poison_kernel(float* out) {
  float* const shared = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x > 0) return;
  out[blockIdx.x] = shared[0];
  shared[0] = 1.0f;  // the next block must not see this value
}

// out[block] = rank, and the value that the next block of the cluster wrote.
__global__ void cluster_kernel(float* out) {
  float* const mine = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x == 0) mine[0] = static_cast<float>(10 + blockIdx.x);
  emulator::cluster_barrier();
  const unsigned next = (emulator::cluster_rank() + 1) % emulator::cluster_size();
  const float seen = reinterpret_cast<const float*>(emulator::peer_shared_memory(next))[0];
  emulator::cluster_barrier();
  if (threadIdx.x == 0) out[blockIdx.x] = 100.0f * static_cast<float>(emulator::cluster_rank()) + seen;
}

// out[block] = the sum of what all blocks have written, behind a barrier of them all; counter is 0.
__global__ void grid_kernel(float* out, float* written, uint32_t* counter) {
  if (threadIdx.x == 0) {
    written[blockIdx.x] = static_cast<float>(1 + blockIdx.x);
    counter_arrive(counter);
    counter_wait(counter, gridDim.x);
  }
  __syncthreads();
  float sum = 0.0f;
  for (unsigned n = 0; n < gridDim.x; ++n) sum += written[n];
  if (threadIdx.x == 0) out[blockIdx.x] = sum + 100.0f * static_cast<float>(emulator::cluster_rank());
}

template <class T>
__global__ void convert_kernel(const float* in, T* out, float* back, int64_t pairs) {
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const uint32_t pair = pack_pair<T>(in[2 * i], in[2 * i + 1]);
    out[2 * i] = T{static_cast<uint16_t>(pair)};
    out[2 * i + 1] = from_float<T>(in[2 * i + 1]);
    const float2 both = unpack_pair<T>(pair);
    back[2 * i] = both.x;
    back[2 * i + 1] = both.y;
  }
}

__global__ void philox_kernel(const int64_t* seed, int32_t* out, uint32_t c1, uint32_t c2) {
  out[threadIdx.x] = static_cast<int32_t>(philox_word0(static_cast<uint64_t>(*seed), threadIdx.x, c1, c2));
}

float* floats(const Tensor& t) {
  return static_cast<float*>(t.data_ptr());
}

void sums(Tensor in, Tensor out, int64_t threads) {
  launch<sums_kernel>({in.numel() / threads, static_cast<int>(threads), threads * 4}, floats(in), floats(out));
}

void shuffles(Tensor out) {
  launch<shuffles_kernel>({1, 32}, static_cast<int*>(out.data_ptr()));
}

void neighbours(Tensor out, bool barrier) {
  launch<neighbours_kernel>({1, static_cast<int>(out.numel()), out.numel() * 4}, floats(out), barrier);
}

void fault(Tensor out, int64_t kind, int64_t grid, int64_t threads, int64_t bytes, int64_t cluster) {
  launch<fault_kernel>({grid, static_cast<int>(threads), bytes, static_cast<int>(cluster)}, floats(out),
                       static_cast<int>(kind), bytes);
}

void poison(Tensor out) {
  launch<poison_kernel>({out.numel(), 32, 16}, floats(out));
}

void cluster(Tensor out, int64_t size) {
  launch<cluster_kernel>({out.numel(), 64, 16, static_cast<int>(size)}, floats(out));
}

void grid(Tensor out, Tensor written, Tensor counter, int64_t size, bool cooperative) {
  launch<grid_kernel>({out.numel(), 64, 16, static_cast<int>(size), cooperative}, floats(out), floats(written),
                      static_cast<uint32_t*>(counter.data_ptr()));
}

void convert(Tensor in, Tensor out, Tensor back) {
  with_half(out, [&](auto zero) {
    using T = decltype(zero);
    launch<convert_kernel<T>>({1, 64}, floats(in), static_cast<T*>(out.data_ptr()), floats(back), in.numel() / 2);
  });
}

void philox(Tensor seed, Tensor out, int64_t c1, int64_t c2) {
  launch<philox_kernel>({1, static_cast<int>(out.numel())}, static_cast<const int64_t*>(seed.data_ptr()),
                        static_cast<int32_t*>(out.data_ptr()), static_cast<uint32_t>(c1), static_cast<uint32_t>(c2));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("probe_sums(Tensor x, Tensor(a!) out, int threads) -> ()");
  m.def("probe_shuffles(Tensor(a!) out) -> ()");
  m.def("probe_neighbours(Tensor(a!) out, bool barrier) -> ()");
  m.def("probe_fault(Tensor(a!) out, int kind, int grid, int threads, int bytes, int cluster) -> ()");
  m.def("probe_poison(Tensor(a!) out) -> ()");
  m.def("probe_cluster(Tensor(a!) out, int size) -> ()");
  m.def("probe_grid(Tensor(a!) out, Tensor(b!) written, Tensor(c!) counter, int size, bool cooperative) -> ()");
  m.def("probe_convert(Tensor x, Tensor(a!) out, Tensor(b!) back) -> ()");
  m.def("probe_philox(Tensor seed, Tensor(a!) out, int c1, int c2) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, m) {
  m.impl("probe_sums", TORCH_BOX(&sums));
  m.impl("probe_shuffles", TORCH_BOX(&shuffles));
  m.impl("probe_neighbours", TORCH_BOX(&neighbours));
  m.impl("probe_fault", TORCH_BOX(&fault));
  m.impl("probe_poison", TORCH_BOX(&poison));
  m.impl("probe_cluster", TORCH_BOX(&cluster));
  m.impl("probe_grid", TORCH_BOX(&grid));
  m.impl("probe_convert", TORCH_BOX(&convert));
  m.impl("probe_philox", TORCH_BOX(&philox));
}

}  // namespace crate_kernels
