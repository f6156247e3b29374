// The functions of emulator_mma.h.
#include "../../../csrc/common/cuda/mma.cuh"

#include <deque>
#include <vector>

#include "emulator_async.h"
#include "emulator_numbers.h"

namespace crate_kernels::emulated {

int64_t products = 0;

namespace {

void multiply(void* const* lanes, bool half) {
  ++products;
  uint32_t a[16][8], b[8][8];
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = p.a[i];
    for (int i = 0; i < 2; ++i) b[g][t + i * 4] = p.b[i];
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][2 * t + i % 2] = p.d[i];
  }
  emulator::multiply_tile(a, b, d, half);
  for (int lane = 0; lane < 32; ++lane) {
    const Product& p = *static_cast<const Product*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) p.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

void load(void* const* lanes, bool transposed) {
  for (int m = 0; m < 4; ++m) {
    uint16_t matrix[8][8];
    unsigned columns = 0;  // of shared memory: its 32 banks are eight columns of 16 bytes
    for (int row = 0; row < 8; ++row) {
      const void* const from = static_cast<Matrices*>(lanes[8 * m + row])->row;
      if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("ldmatrix reads rows at multiples of 16 bytes");
      emulator::async::touched(from, 16);
      memcpy(matrix[row], from, 16);
      columns |= 1u << reinterpret_cast<uintptr_t>(from) / 16 % 8;
    }
    if (columns != 0xff) emulator::fail("rows of a matrix meet in a bank of shared memory");
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t low = transposed ? matrix[2 * t][g] : matrix[g][2 * t];
      const uint32_t high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      static_cast<Matrices*>(lanes[lane])->r[m] = low | high << 16;
    }
  }
}

// A copy that a thread started. Null `to`: the end of a group.
struct Copy {
  void* to;
  int size;
  unsigned char bytes[16];
};

std::vector<std::deque<Copy>> copies;  // of each thread that runs

std::deque<Copy>& mine() {
  const emulator::Thread& thread = *emulator::current;
  const size_t index = thread.block->number * thread.group->threads + thread.index;
  if (copies.size() <= index) copies.resize(thread.group->count * thread.group->threads);
  return copies[index];
}

}  // namespace

void multiply_fp16(void* const* lanes) {
  multiply(lanes, true);
}

void multiply_bf16(void* const* lanes) {
  multiply(lanes, false);
}

void load_matrices_straight(void* const* lanes) {
  load(lanes, false);
}

void load_matrices_transposed(void* const* lanes) {
  load(lanes, true);
}

void copy_later(void* shared, const void* global, int bytes, bool present) {
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      (present && reinterpret_cast<uintptr_t>(global) % bytes != 0)) {
    emulator::fail("cp.async copies between multiples of its size");
  }
  Copy copy = {shared, bytes, {}};
  if (present) {
    emulator::async::touched(global, bytes);
    memcpy(copy.bytes, global, bytes);
  }
  emulator::async::stored(shared, bytes);
  memset(shared, 0xff, bytes);
  mine().push_back(copy);
}

void copies_commit() {
  mine().push_back({nullptr, 0, {}});
}

void copies_wait(int groups) {
  std::deque<Copy>& queue = mine();
  int open = 0;
  for (const Copy& copy : queue) open += copy.to == nullptr;
  for (; open > groups; queue.pop_front()) {
    const Copy& copy = queue.front();
    if (copy.to == nullptr) {
      --open;
    } else {
      emulator::async::stored(copy.to, copy.size);
      memcpy(copy.to, copy.bytes, copy.size);
    }
  }
}

void forget_copies() {
  copies.clear();
}

}  // namespace crate_kernels::emulated
