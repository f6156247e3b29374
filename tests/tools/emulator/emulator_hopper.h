// The functions of csrc/common/cuda/hopper.cuh on the CPU.
#pragma once

#include <cstring>
#include <type_traits>

#include "emulator_async.h"

namespace crate_kernels {

inline unsigned char* aligned_shared_memory() {
  return emulator::shared_memory();
}
inline uint32_t shared_address(const void* shared) {
  return emulator::async::address_of(shared);
}

template <class T, int N>
struct Wgmma {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256);
  template <bool MN_A, bool MN_B>
  static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool adds) {
    emulator::async::product({N, std::is_same_v<T, fp16>, false, adds, MN_A, MN_B, a, b}, d, nullptr);
  }
  template <bool MN_B>
  static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool adds) {
    emulator::async::product({N, std::is_same_v<T, fp16>, true, adds, false, MN_B, 0, b}, d, a);
  }
};

inline void wgmma_fence() {
  emulator::async::product_fence();
}
inline void wgmma_commit() {
  emulator::async::product_commit();
}
template <int N>
void wgmma_wait() {
  emulator::async::product_wait(N);
}
template <class T, int N>
void pin(T (&)[N]) {}
inline int fresh(int number) {
  return number;
}
inline void settle(float number) {
  if (number < 0.0f) emulator::fail("a number that settles is negative");
}

inline void barrier_sync(int barrier, int threads) {
  emulator::async::named_sync(barrier, threads);
}
inline void barrier_arrive(int barrier, int threads) {
  emulator::async::named_arrive(barrier, threads);
}
inline void fence_async_shared() {
  emulator::async::proxy_fence();
}

namespace emulated {

struct Rows {
  uint32_t* r;
  uint32_t row;
};

// One access to four matrices; the rows of each must lie in different banks.
template <bool STORES, bool TRANSPOSED = false>
void move_matrices(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    unsigned columns = 0;
    for (int row = 0; row < 8; ++row) columns |= 1u << static_cast<Rows*>(lanes[8 * m + row])->row / 16 % 8;
    if (columns != 0xff) emulator::fail("rows of a matrix meet in a bank of shared memory");
    if constexpr (TRANSPOSED) {
      uint32_t registers[32];
      for (int lane = 0; lane < 32; ++lane) registers[lane] = static_cast<Rows*>(lanes[lane])->r[m];
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, first = lane % 4 * 2;  // its two columns are those of other lanes
        const auto of = [&](int column) { return registers[4 * column + row / 2] >> 16 * (row % 2) & 0xffff; };
        static_cast<Rows*>(lanes[lane])->r[m] = of(first) | of(first + 1) << 16;
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t row = static_cast<Rows*>(lanes[8 * m + lane / 4])->row;
      unsigned char* const here = emulator::async::at(row, 16, 16) + lane % 4 * 4;
      uint32_t& r = static_cast<Rows*>(lanes[lane])->r[m];
      if constexpr (STORES) {
        if (lane % 4 == 0) emulator::async::wrote(row, 16);
        memcpy(here, &r, 4);
      } else {
        if (lane % 4 == 0) emulator::async::read(row, 16);
        memcpy(&r, here, 4);
      }
    }
  }
}

template <class V>
V load_as(uint32_t address) {
  emulator::async::read(address, sizeof(V));
  V v;
  memcpy(&v, emulator::async::at(address, sizeof v, sizeof v), sizeof v);
  return v;
}

template <class V>
void store_as(uint32_t address, const V& v) {
  emulator::async::wrote(address, sizeof v);
  memcpy(emulator::async::at(address, sizeof v, sizeof v), &v, sizeof v);
}

}  // namespace emulated

inline void load_matrices(uint32_t (&r)[4], uint32_t row) {
  emulated::Rows mine = {r, row};
  emulator::collective(&mine, emulated::move_matrices<false>);
}
inline void store_matrices(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  emulated::Rows mine = {r, row};
  emulator::collective(&mine, emulated::move_matrices<true>);
}
inline void store_matrices_transposed(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  emulated::Rows mine = {r, row};
  emulator::collective(&mine, emulated::move_matrices<true, true>);
}

inline float inverse_fast(float x) {
  const auto flushed = [](float v) { return fabsf(v) < 1.1754944e-38f ? copysignf(0.0f, v) : v; };
  return flushed(1.0f / flushed(x));
}
inline float log2_fast(float x) {
  return log2f(x);
}
template <class T>
void add_squares(uint32_t& sums, uint32_t pair) {
  const float2 sum = unpack_pair<T>(sums), x = unpack_pair<T>(pair);
  sums = pack_pair<T>(fmaf(x.x, x.x, sum.x), fmaf(x.y, x.y, sum.y));
}

inline uint4 load_shared_4(uint32_t address) {
  return emulated::load_as<uint4>(address);
}
inline float2 load_shared_2(uint32_t address) {
  return emulated::load_as<float2>(address);
}
inline float load_shared(uint32_t address) {
  return emulated::load_as<float>(address);
}
inline void store_shared_4(uint32_t address, uint4 v) {
  emulated::store_as(address, v);
}
inline void store_shared(uint32_t address, float v) {
  emulated::store_as(address, v);
}
inline void copy_async_16(uint32_t shared, const void* global, bool present) {
  emulator::async::copy(shared, present ? global : nullptr, 16);
}
inline void copy_async_4(uint32_t shared, const void* global) {
  emulator::async::copy(shared, global, 4);
}
inline void copy_async_commit() {
  emulator::async::copy_commit();
}
template <int N>
void copy_async_wait() {
  emulator::async::copy_wait(N);
}

inline void mbarrier_init(uint32_t barrier, int count) {
  emulator::async::mbarrier_init(barrier, count);
}
inline void mbarrier_init_fence() {
  emulator::async::mbarrier_fence();
}
inline void mbarrier_arrive(uint32_t barrier) {
  emulator::async::mbarrier_arrive(barrier, 0);
}
inline void mbarrier_expect(uint32_t barrier, int bytes) {
  emulator::async::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::async::mbarrier_wait(barrier, parity);
}

namespace emulated {

// What the emulator keeps in a TensorMap: sizes in elements, strides in bytes, from the innermost dimension outwards.
struct Map {
  const unsigned char* base;
  int64_t strides[5];
  int32_t sizes[5], box[5];
  int32_t element, swizzle;
};
static_assert(sizeof(Map) <= sizeof(TensorMap));

}  // namespace emulated

#pragma GCC visibility push(default)  // libraries of single kernels share it: entry.h
void tensor_load(uint32_t shared, const TensorMap& map, uint32_t barrier, int x, int y, int z, int w);
void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier);
void add_global_4(float* to, float x, float y, float z, float w);
#pragma GCC visibility pop
inline void bulk_add(float* global, uint32_t shared, int bytes) {
  emulator::async::add(global, shared, bytes);
}
inline void bulk_commit() {
  emulator::async::store_commit();
}
template <int N>
void bulk_wait_read() {
  emulator::async::store_wait(N);
}

template <int COUNT>
void more_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 240);
  emulator::async::more_registers(COUNT);
}
template <int COUNT>
void fewer_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 240);
  emulator::async::fewer_registers(COUNT);
}

}  // namespace crate_kernels
