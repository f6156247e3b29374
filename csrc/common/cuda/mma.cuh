// Tensor-core instructions of sm_80 and later, with their loads: mma.m16n8k16, ldmatrix, cp.async.
//
// Lane 4 g + t holds (a and b: two elements per register):
// left operand (16x16): a[0] row g, columns 2t and 2t + 1; a[1] row g + 8; a[2], a[3] the same rows, 8 columns further
// right operand (16x8): b[0] rows 2t and 2t + 1 of column g; b[1] 8 rows further
// product (16x8): d[0], d[1] row g, columns 2t and 2t + 1; d[2], d[3] row g + 8
// So two products side by side, packed, are the left operand of the next product.
#pragma once

#include <cstdint>

#include "device.cuh"

namespace crate_kernels {

// Kernels are compiled for sm_75 too, which has none of this: guard each use by `if constexpr (kTensorCores)`.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kTensorCores = false;
#else
constexpr bool kTensorCores = true;
#endif

}  // namespace crate_kernels

#ifndef __CUDACC__
#include "../../../tests/tools/emulator/emulator_mma.h"  // the same functions on the CPU
#else

namespace crate_kernels {

// d += a b: 16-bit operands, fp32 sums.
template <class T>
CRATE_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
CRATE_DEVICE void mma_16816<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
CRATE_DEVICE void mma_16816<fp16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

CRATE_DEVICE uint32_t shared_address(const void* generic) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(generic));
}

// Loads four 8x8 matrices of halves from shared memory. Lane 8 m + r gives the address of row r of matrix m. It gets
// from every matrix columns 2t and 2t + 1 of row g; transposed, rows 2t and 2t + 1 of column g.
CRATE_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

CRATE_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Asynchronous copies from global to shared memory. With `present` false they write zeros and do not read `global`.
CRATE_DEVICE void cp_async_16(void* shared, const void* global, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(present ? 16 : 0)
               : "memory");
}

CRATE_DEVICE void cp_async_4(void* shared, const void* global, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(present ? 4 : 0)
               : "memory");
}

CRATE_DEVICE void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's committed groups are unfinished.
template <int N>
CRATE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^x by the hardware's instruction, within 2 ulp. exp2f needs three instructions more, for results below 2^-126.
CRATE_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace crate_kernels

#endif
