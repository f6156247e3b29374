// What sm_90a has beside tensor cores: asynchronous products (wgmma.cuh), barriers that count bytes, bulk copies and
// tensor maps, named barriers, matrix stores. Kernels that include it are compiled for sm_90a alone.
//
// Places in shared memory are 32-bit addresses, from shared_address.
#pragma once

#include <cstdint>

#include "device.cuh"
#include "mma.cuh"

namespace crate_kernels {

// How rows of shared memory are permuted: the 16-byte chunks of 8 rows of so many bytes, by the row's number.
enum class Swizzle : uint32_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// An operand of wgmma in shared memory. K-major, an atom is 8 rows (of M or N) of the swizzle's bytes, and `stride` is
// the bytes from one group of 8 rows to the next; `leading`, without swizzle, the bytes from 8 elements of K to the
// next 8. MN-major, an atom is 8 rows (of K) of the swizzle's bytes of M or N; `stride` leads from 8 rows of K to the
// next, `leading` from one atom to the next along M or N. With a swizzle, atoms begin at multiples of 8 rows.
template <Swizzle SWIZZLE = Swizzle::k128>
CRATE_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  const uint32_t high = static_cast<uint32_t>(SWIZZLE) << 30 | stride >> 4;
  return static_cast<uint64_t>(high) << 32 | ((address >> 4) + (leading >> 4 << 16));  // the address is below 2^18
}

// The operand `bytes` further on. No carry: the sum of the addresses is below 2^18.
CRATE_DEVICE uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// The tensor map of a kernel's parameter (cuTensorMapEncodeTiled): `const __grid_constant__ TensorMap map`.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace crate_kernels

#ifndef __CUDACC__
#include "../../../tests/tools/emulator/emulator_hopper.h"  // the same functions on the CPU
#else

#include "wgmma.cuh"

namespace crate_kernels {

// The dynamic shared memory of the block, where swizzled atoms may begin.
CRATE_DEVICE unsigned char* aligned_shared_memory() {
  extern __shared__ __align__(1024) unsigned char crate_aligned_shared_memory[];
  return crate_aligned_shared_memory;
}

// Before the first product that reads registers, or sums, which the warp group has written since its last product.
CRATE_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
CRATE_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N committed groups of products are unfinished.
template <int N>
CRATE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Registers that an asynchronous product writes or reads: no use of them is moved before or behind this place.
template <int N>
CRATE_DEVICE void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
CRATE_DEVICE void pin(uint32_t (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
// The same number; the compiler does not know what it is made of, and computes no address from it ahead of its use.
CRATE_DEVICE int fresh(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
// Makes a number, at least 0 or NaN, before what follows in the program: the assembler else moves powers behind a wait
// for products that they could run beside. All lanes of a warp meet; it does not know that the mask is always full.
CRATE_DEVICE void settle(float number) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 m;\nsetp.lt.f32 p, %0, 0f00000000;\nselp.b32 m, 0, 0xffffffff, p;\n"
      "bar.warp.sync m;\n}" ::"f"(number)
      : "memory");
}

// Barriers 1 to 15 of the block, for so many threads: whole warps. `arrive` does not wait.
CRATE_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
CRATE_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Orders this thread's accesses to shared memory before asynchronous ones (products, bulk copies) of threads that a
// barrier orders behind it.
CRATE_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 8x8 matrices of halves, as ldmatrix_x4 of mma.cuh; lane 8 m + r gives the address of row r of matrix m.
CRATE_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
CRATE_DEVICE void store_matrices(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}
// The same of transposed matrices: a lane has rows 2t and 2t + 1 of column g.
CRATE_DEVICE void store_matrices_transposed(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

CRATE_DEVICE uint4 load_shared_4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
CRATE_DEVICE float2 load_shared_2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
CRATE_DEVICE float load_shared(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
CRATE_DEVICE void store_shared_4(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
CRATE_DEVICE void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
// Adds to four numbers in global memory; no order of adds by several threads.
CRATE_DEVICE void add_global_4(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// 16 bytes from global memory, zeros unless `present`, in groups of the thread.
CRATE_DEVICE void copy_async_16(uint32_t shared, const void* global, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(present ? 16 : 0)
               : "memory");
}
// 4 bytes in the same way.
CRATE_DEVICE void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
CRATE_DEVICE void copy_async_commit() {
  cp_async_commit();
}
template <int N>
CRATE_DEVICE void copy_async_wait() {
  cp_async_wait<N>();
}

// 1 / x and log2 x by the hardware's instructions: within 1 ulp, and within 2^-22.
CRATE_DEVICE float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CRATE_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// sums += the squares of a pair, all three of T, rounded.
template <class T>
CRATE_DEVICE void add_squares(uint32_t& sums, uint32_t pair) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %1, %0;" : "+r"(sums) : "r"(pair));
  } else {
    asm("fma.rn.f16x2 %0, %1, %1, %0;" : "+r"(sums) : "r"(pair));
  }
}

// Barriers in shared memory, 8 bytes each: a phase ends with `count` arrivals and all bytes that it expects.
CRATE_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Behind the last mbarrier_init: other threads (after a barrier) and asynchronous copies may use them.
CRATE_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CRATE_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase expect so many bytes more.
CRATE_DEVICE void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity: the first is 0. The one before the first has ended, with parity 1.
CRATE_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE%=;\nbra WAIT%=;\n"
      "DONE%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Bulk copies by one thread; addresses and bytes are multiples of 16. A load ends with a barrier's bytes. A tensor
// map's box lies at `shared`, swizzled; what is outside the tensor is 0.
CRATE_DEVICE void tensor_load(uint32_t shared, const TensorMap& map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Bytes from global memory as they lie there.
CRATE_DEVICE void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// Sums to global memory, in groups. bulk_wait_read: shared memory may be written again when at most N groups are
// unfinished.
CRATE_DEVICE void bulk_add(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
CRATE_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
CRATE_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// The registers that each thread of this warp group may use: as many as a multiple of 8 from 24 to 240.
template <int COUNT>
CRATE_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
CRATE_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace crate_kernels

#endif
