// Thread-block clusters: blocks that can wait for each other and read each other's shared memory, from sm_90 on. On
// earlier devices, and in a launch without clusters, a cluster is one block. Only dynamic shared memory may be read
// this way: the emulator does not find a peer's static __shared__ arrays.
#pragma once

#include "device.cuh"

namespace crate_kernels {

#ifndef __CUDACC__

CRATE_DEVICE int cluster_rank() {
  return static_cast<int>(emulator::cluster_rank());
}
CRATE_DEVICE int cluster_size() {
  return static_cast<int>(emulator::cluster_size());
}
CRATE_DEVICE void cluster_sync() {
  emulator::cluster_barrier();
}
CRATE_DEVICE float cluster_read(const float* own, int rank) {
  const int64_t at = reinterpret_cast<const unsigned char*>(own) - emulator::shared_memory();
  return *reinterpret_cast<const float*>(emulator::peer_shared_memory(rank) + at);
}
CRATE_DEVICE float4 cluster_read_4(const float* own, int rank) {
  const int64_t at = reinterpret_cast<const unsigned char*>(own) - emulator::shared_memory();
  return *reinterpret_cast<const float4*>(emulator::peer_shared_memory(rank) + at);
}

#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

CRATE_DEVICE int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

CRATE_DEVICE int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}

// Barrier of all threads of the cluster. Stores before the barrier are visible after it. A block must not end while a
// peer may still read its shared memory: kernels call this once more before they return.
CRATE_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Reads from block `rank` of the cluster the float at the place that `own` has in this block's shared memory.
CRATE_DEVICE float cluster_read(const float* own, int rank) {
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  uint32_t there;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
}
// Four of them, at a multiple of 16 bytes.
CRATE_DEVICE float4 cluster_read_4(const float* own, int rank) {
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  uint32_t there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}

#else

CRATE_DEVICE int cluster_rank() {
  return 0;
}
CRATE_DEVICE int cluster_size() {
  return 1;
}
CRATE_DEVICE void cluster_sync() {
  __syncthreads();
}
CRATE_DEVICE float cluster_read(const float* own, int) {
  return *own;
}
CRATE_DEVICE float4 cluster_read_4(const float* own, int) {
  return *reinterpret_cast<const float4*>(own);
}

#endif

// Sums a number over the blocks of the cluster. Every block adds in the order of the ranks.
CRATE_DEVICE float cluster_total(const float* own) {
  float total = cluster_read(own, 0);
  for (int rank = 1; rank < cluster_size(); ++rank) total += cluster_read(own, rank);
  return total;
}

}  // namespace crate_kernels
