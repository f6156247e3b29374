// wgmma.mma_async m64nNk16 of sm_90a: products of a warp group, 128 threads.
//
// A is 64 x 16, from registers (rs) or shared memory (ss), B 16 x N from shared memory, sums are fp32. Thread
// 32 w + 4 g + t holds rows 16 w + g and 16 w + g + 8: d[4 i + e] is row g + 8 (e / 2), column 8 i + 2 t + e % 2. A's
// registers are as the left operand of mma.cuh, of the warp's 16 rows. MN_A and MN_B say that an operand's M or N, not
// its K, lies in consecutive elements. An asynchronous product must not be read, nor its operands written, before
// wgmma_wait.
//
// The first product of a chain only writes its sums: ptxas serialises a chain whose first sums are read.
#pragma once

#include "device.cuh"

#ifdef __CUDACC__

#define CRATE_NUMBERS_4 "%0, %1, %2, %3"
#define CRATE_NUMBERS_8 CRATE_NUMBERS_4 ", %4, %5, %6, %7"
#define CRATE_NUMBERS_16 CRATE_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CRATE_NUMBERS_24 CRATE_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CRATE_NUMBERS_32 CRATE_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CRATE_NUMBERS_40 CRATE_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CRATE_NUMBERS_48 CRATE_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CRATE_NUMBERS_56 CRATE_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CRATE_NUMBERS_64 CRATE_NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"

#define CRATE_SUMS_4(sign, i) sign(d[i]), sign(d[i + 1]), sign(d[i + 2]), sign(d[i + 3])
#define CRATE_SUMS_8(sign, i) CRATE_SUMS_4(sign, i), CRATE_SUMS_4(sign, i + 4)
#define CRATE_SUMS_16(sign, i) CRATE_SUMS_8(sign, i), CRATE_SUMS_8(sign, i + 8)
#define CRATE_SUMS_24(sign, i) CRATE_SUMS_16(sign, i), CRATE_SUMS_8(sign, i + 16)
#define CRATE_SUMS_32(sign, i) CRATE_SUMS_16(sign, i), CRATE_SUMS_16(sign, i + 16)
#define CRATE_SUMS_40(sign, i) CRATE_SUMS_32(sign, i), CRATE_SUMS_8(sign, i + 32)
#define CRATE_SUMS_48(sign, i) CRATE_SUMS_32(sign, i), CRATE_SUMS_16(sign, i + 32)
#define CRATE_SUMS_56(sign, i) CRATE_SUMS_32(sign, i), CRATE_SUMS_24(sign, i + 32)
#define CRATE_SUMS_64(sign, i) CRATE_SUMS_32(sign, i), CRATE_SUMS_32(sign, i + 32)

namespace crate_kernels {

template <class T, int N>
struct Wgmma;

// COUNT sums a thread; the next six operands have the numbers I0 to I5.
#define CRATE_WGMMA_PRODUCT(NAME, KEEP, SIGN, TYPE, N, COUNT, I0, I1, I2, I3, I4, I5)                       \
  template <bool MN_A, bool MN_B>                                                                           \
  static CRATE_DEVICE void ss_##NAME(float (&d)[COUNT], uint64_t a, uint64_t b) {                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP                                                   \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CRATE_NUMBERS_##COUNT \
                 "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I2 ", %" #I3 ";\n}"                                   \
                 : CRATE_SUMS_##COUNT(SIGN, 0)                                                              \
                 : "l"(a), "l"(b), "n"(int(MN_A)), "n"(int(MN_B)));                                         \
  }                                                                                                         \
  template <bool MN_B>                                                                                      \
  static CRATE_DEVICE void rs_##NAME(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP                                                   \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CRATE_NUMBERS_##COUNT \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, %" #I5 ";\n}"             \
                 : CRATE_SUMS_##COUNT(SIGN, 0)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(MN_B)));                     \
  }
#define CRATE_WGMMA_OF(T, TYPE, N, COUNT, ...)                                                      \
  template <>                                                                                       \
  struct Wgmma<T, N> {                                                                              \
    CRATE_WGMMA_PRODUCT(first, "0", "=f", TYPE, N, COUNT, __VA_ARGS__)                              \
    CRATE_WGMMA_PRODUCT(next, "1", "+f", TYPE, N, COUNT, __VA_ARGS__)                               \
    template <bool MN_A, bool MN_B>                                                                 \
    static CRATE_DEVICE void ss(float (&d)[COUNT], uint64_t a, uint64_t b, bool adds) {             \
      if (adds)                                                                                     \
        ss_next<MN_A, MN_B>(d, a, b);                                                               \
      else                                                                                          \
        ss_first<MN_A, MN_B>(d, a, b);                                                              \
    }                                                                                               \
    template <bool MN_B>                                                                            \
    static CRATE_DEVICE void rs(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool adds) { \
      if (adds)                                                                                     \
        rs_next<MN_B>(d, a, b);                                                                     \
      else                                                                                          \
        rs_first<MN_B>(d, a, b);                                                                    \
    }                                                                                               \
  };
#define CRATE_WGMMA(N, COUNT, ...)                    \
  CRATE_WGMMA_OF(bf16, "bf16", N, COUNT, __VA_ARGS__) \
  CRATE_WGMMA_OF(fp16, "f16", N, COUNT, __VA_ARGS__)

CRATE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9)
CRATE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
CRATE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
CRATE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
CRATE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
CRATE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
CRATE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
CRATE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
CRATE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)

}  // namespace crate_kernels

#endif
