// Cuts an arena's memory into cache-aligned arrays.
#pragma once

#include <stdint.h>

#include "arena.h"

namespace {

using crate_kernels::Arena;

// Used twice by cut_arena: first without memory, to count the bytes, then to hand out the arrays.
class Scratch {
 public:
  explicit Scratch(char* memory) : memory_(memory) {}

  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
  int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(bytes(count * 4)); }
  int64_t used() const { return used_; }

 private:
  char* bytes(int64_t count) {
    char* const p = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count + 63) / 64 * 64;
    return p;
  }

  char* memory_;
  int64_t used_ = 0;
};

template <class Cut>
void cut_arena(Arena& arena, const Cut& cut) {
  Scratch counting(nullptr);
  cut(counting);
  Scratch scratch(arena.reserve(counting.used()));
  cut(scratch);
}

}  // namespace
