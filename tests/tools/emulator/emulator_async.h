// What runs beside the threads of an emulated block, and who has seen what of it.
//
// Asynchronous copies land as late as they may: when no thread can go on, one at a time, the last first. Products run
// at the wait for them, or, if Device::early, as they are issued; until the wait their sums are NaN.
//
// Races are found by vector clocks (happens-before): every thread counts its steps, and knows of each other thread up
// to which step it is ordered behind it. Barriers merge that knowledge. Each 4 bytes of shared memory remember who
// wrote and read them, at which step. A thread also knows of each other which step its last proxy fence was at:
// asynchronous readers must know of a fence behind the write. Accesses by the functions of hopper.cuh are always
// followed, all others where Device::traced: emulator_races.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "emulator.h"

#pragma GCC visibility push(default)  // libraries of single kernels share it: entry.h

namespace emulator::async {

constexpr uint32_t kBase = 1024;  // where shared memory begins, as 32-bit addresses

// Called as a group of blocks starts, and after its last thread has returned: nothing may be unfinished then.
void start(Group& group);
void finish();
// Lets one copy land. Returns false if there is none.
bool land();
// The running thread comes to a barrier; the barrier is complete; the thread goes on.
void arrived(const Barrier& barrier);
void completed(const Barrier& barrier);
void ordered(const Barrier& barrier);

// Memory at a 32-bit address of the running thread's block; fails outside of it or if misaligned.
unsigned char* at(uint32_t address, int64_t bytes, uint32_t alignment);
uint32_t address_of(const void* shared);

// The running thread accesses so many bytes.
void wrote(uint32_t address, int bytes);
void read(uint32_t address, int bytes);

// The same of any memory, where Device::traced. An addition is one instruction.
void touched(const void* at, int64_t bytes);
void stored(const void* at, int64_t bytes);
void added(const void* at, int64_t bytes);
// The running thread has counted one; it has waited for a count.
void counted(const uint32_t* counter);
void waited(const uint32_t* counter, uint32_t count);
// After the last thread has returned: peers had read a block's shared memory before it ended.
void check_peers();
// A launch starts; the next blocks of it run.
void forget_pages();
void next_group();

// Named barriers of the block.
void named_sync(int barrier, int threads);
void named_arrive(int barrier, int threads);
void proxy_fence();

void mbarrier_init(uint32_t barrier, int count);
void mbarrier_fence();
void mbarrier_arrive(uint32_t barrier, int bytes);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

// `data` lands at `shared` and ends with so many bytes of the barrier.
void load(uint32_t shared, std::vector<unsigned char> data, uint32_t barrier);
// From shared memory to global, added as floats.
void add(float* global, uint32_t shared, int bytes);
void store_commit();
void store_wait(int groups);

// 4 to 16 bytes by cp.async; null: zeros.
void copy(uint32_t shared, const void* global, int bytes);
void copy_commit();
void copy_wait(int groups);

struct Product {
  int columns;
  bool half;  // fp16; else bf16
  bool a_in_registers, adds, mn_a, mn_b;
  uint64_t a, b;
};
// All threads of a warp group, each with its sums and its registers of A.
void product(const Product& what, float* sums, const uint32_t* registers);
void product_fence();
void product_commit();
void product_wait(int groups);

// Waits for the 128 threads of the warp group; the last one calls act(its pointers).
void by_warp_group(void* mine, const std::function<void(void* const*)>& act);

// Registers a thread of the warp group. A block has all of a multiprocessor, in equal shares; more wait until others
// have given back as many.
void more_registers(int count);
void fewer_registers(int count);
// Whether a warp group waits for registers.
bool lacks_registers();

}  // namespace emulator::async

#pragma GCC visibility pop
