// The tensor-core instructions of csrc/common/cuda/mma.cuh on the CPU, with the fragments of the PTX manual.
#pragma once

#include <cstdint>
#include <type_traits>

#include "emulator.h"

namespace crate_kernels {

#pragma GCC visibility push(default)  // libraries of single kernels share it: entry.h
namespace emulated {

extern int64_t products;  // number of 16x8x16 products so far

struct Product {
  float* d;
  const uint32_t *a, *b;
};
// d += a b for all lanes at once: of fp16, of bf16.
void multiply_fp16(void* const* lanes);
void multiply_bf16(void* const* lanes);

struct Matrices {
  uint32_t* r;
  const void* row;
};
void load_matrices_straight(void* const* lanes);
void load_matrices_transposed(void* const* lanes);

// Copies happen as late as allowed. Until then their destination is garbage.
void copy_later(void* shared, const void* global, int bytes, bool present);
void copies_commit();
void copies_wait(int groups);
// What an ended launch left.
void forget_copies();

}  // namespace emulated
#pragma GCC visibility pop

template <class T>
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulated::Product mine = {d, a, b};
  emulator::collective(&mine, std::is_same_v<T, fp16> ? emulated::multiply_fp16 : emulated::multiply_bf16);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  emulated::Matrices mine = {r, row};
  emulator::collective(&mine, emulated::load_matrices_straight);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  emulated::Matrices mine = {r, row};
  emulator::collective(&mine, emulated::load_matrices_transposed);
}

inline void cp_async_16(void* shared, const void* global, bool present) {
  emulated::copy_later(shared, global, 16, present);
}

inline void cp_async_4(void* shared, const void* global, bool present) {
  emulated::copy_later(shared, global, 4, present);
}

inline void cp_async_commit() {
  emulated::copies_commit();
}

template <int N>
inline void cp_async_wait() {
  emulated::copies_wait(N);
}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.1754944e-38f ? 0.0f : y;  // NaN stays
}

}  // namespace crate_kernels
