// Barriers among blocks of a cooperative launch, all of which are on the GPU at once: counters in global memory, which
// are 0 when the kernel starts and only grow.
#pragma once

#include "device.cuh"

namespace crate_kernels {

#ifndef __CUDACC__

CRATE_DEVICE void counter_arrive(uint32_t* counter) {
  emulator::counter_arrive(counter);
}
CRATE_DEVICE void counter_wait(const uint32_t* counter, uint32_t minimum) {
  emulator::counter_wait(counter, minimum);
}
CRATE_DEVICE float4 read_others_4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

#else

// Counts one. What this thread has written, or a barrier has ordered before it, is visible behind counter_wait.
CRATE_DEVICE void counter_arrive(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Waits for a count of at least `minimum`.
CRATE_DEVICE void counter_wait(const uint32_t* counter, uint32_t minimum) {
  uint32_t count;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  } while (count < minimum);
}
// What other blocks have written since the kernel started: past this multiprocessor's cache.
CRATE_DEVICE float4 read_others_4(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

#endif

}  // namespace crate_kernels
