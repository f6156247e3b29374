// The tensor-core instructions of csrc/common/cuda/mma.cuh on the CPU, with the fragments of the PTX manual.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>

namespace crate_kernels {

namespace emulated {

extern __attribute__((visibility("default"))) int64_t products;  // number of 16x8x16 products so far

struct Product {
  float (&d)[4];
  const uint32_t (&a)[4], (&b)[2];
};

// d += a b for all lanes at once.
template <class T>
void multiply(void* const* lanes) {
  ++products;
  float a[16][16], b[16][8], d[16][8];
  const auto half = [](uint32_t pair, int which) { return to_float(T{static_cast<uint16_t>(pair >> 16 * which)}); };
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int which = 0; which < 2; ++which) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + which + i / 2 * 8] = half(p.a[i], which);
      for (int i = 0; i < 2; ++i) b[2 * t + which + i * 8][g] = half(p.b[i], which);
    }
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][2 * t + i % 2] = p.d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<const Product*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) p.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

struct Matrices {
  uint32_t (&r)[4];
  const char* row;
};

template <bool TRANS>
void load_matrices(void* const* lanes) {
  for (int m = 0; m < 4; ++m) {
    uint16_t matrix[8][8];
    unsigned columns = 0;  // of shared memory: its 32 banks are eight columns of 16 bytes
    for (int row = 0; row < 8; ++row) {
      const char* const from = static_cast<Matrices*>(lanes[8 * m + row])->row;
      memcpy(matrix[row], from, 16);
      columns |= 1u << reinterpret_cast<uintptr_t>(from) / 16 % 8;
    }
    if (columns != 0xff) emulator::fail("rows of a matrix meet in a bank of shared memory");
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t low = TRANS ? matrix[2 * t][g] : matrix[g][2 * t];
      const uint32_t high = TRANS ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      static_cast<Matrices*>(lanes[lane])->r[m] = low | high << 16;
    }
  }
}

template <bool TRANS>
void ldmatrix(uint32_t (&r)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::fail("ldmatrix reads rows at multiples of 16 bytes");
  Matrices mine = {r, static_cast<const char*>(row)};
  emulator::collective(&mine, load_matrices<TRANS>);
}

// A copy that a thread started. Null `to`: the end of a group.
struct Copy {
  void* to;
  size_t size;
  unsigned char bytes[16];
};

inline thread_local std::deque<Copy> copies[1024];

// Copies happen as late as allowed. Until then their destination is garbage.
template <int BYTES>
void copy_later(void* shared, const void* global, bool present) {
  if (reinterpret_cast<uintptr_t>(shared) % BYTES != 0 ||
      (present && reinterpret_cast<uintptr_t>(global) % BYTES != 0)) {
    emulator::fail("cp.async copies between multiples of its size");
  }
  Copy copy = {shared, BYTES, {}};
  if (present) memcpy(copy.bytes, global, BYTES);
  memset(shared, 0xff, BYTES);
  copies[threadIdx.x].push_back(copy);
}

}  // namespace emulated

template <class T>
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulated::Product mine = {d, a, b};
  emulator::collective(&mine, emulated::multiply<T>);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  emulated::ldmatrix<false>(r, row);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  emulated::ldmatrix<true>(r, row);
}

inline void cp_async_16(void* shared, const void* global, bool present) {
  emulated::copy_later<16>(shared, global, present);
}

inline void cp_async_4(void* shared, const void* global, bool present) {
  emulated::copy_later<4>(shared, global, present);
}

inline void cp_async_commit() {
  emulated::copies[threadIdx.x].push_back({nullptr, 0, {}});
}

template <int N>
inline void cp_async_wait() {
  std::deque<emulated::Copy>& queue = emulated::copies[threadIdx.x];
  int groups = 0;
  for (const emulated::Copy& copy : queue) groups += copy.to == nullptr;
  for (; groups > N; queue.pop_front()) {
    const emulated::Copy& copy = queue.front();
    if (copy.to == nullptr) {
      --groups;
    } else {
      memcpy(copy.to, copy.bytes, copy.size);
    }
  }
}

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.1754944e-38f ? 0.0f : y;  // NaN stays
}

}  // namespace crate_kernels
