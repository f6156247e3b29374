// Runs CUDA blocks on the CPU, one fiber per thread, so that tests of csrc's kernels and of their planners need no GPU.
// g++ includes this file before any other (-include), in place of what is built into a compiler of CUDA.
//
// Blocks run one after another; the blocks of a cluster, and of a cooperative launch, run together. A thread runs until
// it waits for others. Tests can reverse the order of the threads (Device::descending): accesses that no barrier orders
// then give different results. Dynamic shared memory is NaN when a block starts. Protected pages around it stop a
// kernel that leaves it. Errors are: threads that wait for each other forever, warps that meet at different places, and
// launches that a device of the chosen kind would refuse.
#ifndef CRATE_KERNELS_EMULATOR_H  // a copy of this file is compiled beforehand: `once` would not know it again
#define CRATE_KERNELS_EMULATOR_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static  // in kernels without clusters: one block runs at a time
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

#pragma GCC visibility push(default)  // libraries of single kernels share the rest: entry.h
namespace emulator {

// Properties that a test sets with the operator emulated_device. The default is a GPU of compute capability 8.0.
struct Device {
  int capability = 80, multiprocessors = 4, shared_limit = 163 * 1024;
  bool descending = false;  // the order in which threads run
  bool early = false;       // asynchronous products run as they are issued, not at the wait for them
  bool traced = false;      // every access to memory is followed, of kernels that are compiled so
};
Device& device();

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Cluster {
  Barrier barrier;
  int live;
};

struct Block {
  unsigned index, number, rank;  // in the grid; among those that run together; in the cluster
  unsigned char* shared;
  int64_t shared_bytes;
  Barrier barrier;
  int live;
  int votes[2];  // of this barrier, and of the last one, which threads may still read
  Cluster* cluster;
};

struct Warp {
  Barrier barrier, sync;  // of collective operations; of __syncwarp
  void* lanes[32];
  void (*act)(void* const*);
  int live;
  uint32_t shuffles = 0;  // so far
  bool acts = false;      // in one instruction of all lanes
};

struct Group {  // the blocks that run together
  Block* blocks;
  unsigned count, cluster, threads, grid;  // blocks; of a cluster; threads of a block
};

struct Thread {
  Group* group;
  Block* block;
  Warp* warp;
  unsigned index;
};

extern Thread* current;

// Waits for every thread of the block. Returns the number of threads that voted.
int block_barrier(bool vote = false);
// Waits for every thread of the cluster.
void cluster_barrier();
// Waits for all 32 lanes of the warp. The last lane calls act(lanes); lanes[n] is lane n's `mine`, and act may write
// there. Fails if the lanes pass different acts. `shuffles`: each lane gets what others have computed.
void collective(void* mine, void (*act)(void* const* lanes), bool shuffles = false);
// Lets other threads run until `ready()`.
void suspend_until(const std::function<bool()>& ready);
// Waits for `count` threads at a barrier, and orders them: see emulator_async.h.
void wait_for(Barrier& barrier, int count);
// The same; orders nothing.
void wait_unordered(Barrier& barrier, int count);
// Counts as a thread that came to a barrier, and goes on.
void arrive_at(Barrier& barrier, int count);
// A counter of blocks in global memory: counts one; waits for a count.
void counter_arrive(uint32_t* counter);
void counter_wait(const uint32_t* counter, uint32_t minimum);
void warp_barrier();
// Whether memory is a thread's own.
bool on_stack(const void* at);
// Ends the launch with an error.
[[noreturn]] void fail(const char* what);
// Ends it after the last thread has returned.
void report(const char* what);

inline unsigned char* shared_memory() {
  return current->block->shared;
}
inline unsigned cluster_rank() {
  return current->block->rank;
}
inline unsigned cluster_size() {
  return current->group->cluster;
}
inline unsigned char* peer_shared_memory(unsigned rank) {
  if (rank >= current->group->cluster) fail("a cluster has no block of this rank");
  return (current->block - current->block->rank + rank)->shared;
}

// A shuffle: lane n gets the value of lane source(n). It keeps its own if that lane is outside its segment.
template <class T>
struct Shuffle {
  T value, result;
  int source;
};

template <class T>
T shuffle(unsigned mask, T value, int source) {
  if (mask != 0xffffffffu) fail("only shuffles of whole warps are emulated");
  Shuffle<T> mine = {value, value, source};
  collective(
      &mine,
      [](void* const* lanes) {
        for (int n = 0; n < 32; ++n) {
          Shuffle<T>& lane = *static_cast<Shuffle<T>*>(lanes[n]);
          if (lane.source >= 0) lane.result = static_cast<Shuffle<T>*>(lanes[lane.source])->value;
        }
      },
      true);
  return mine.result;
}

unsigned ballot(unsigned mask, bool vote);

// A launch. Its grid has one dimension.
struct Launch {
  int64_t grid;  // blocks
  int threads;   // of a block
  int64_t shared_bytes = 0;
  int cluster = 1;           // blocks
  bool cooperative = false;  // the whole grid runs together
};

// As CUDA numbers them.
enum Error { kSuccess = 0, kInvalidValue = 1, kInvalidConfiguration = 9, kTooLarge = 720 };

// Lets a kernel have so much dynamic shared memory; without this, it may have kUnasked.
constexpr int64_t kUnasked = 48 * 1024;
Error allow(const void* kernel, int64_t shared_bytes);
// Says whether the device would take a launch.
Error check(const Launch& launch, const void* kernel);
// Runs a launch to its end.
void run(const Launch& launch, const std::function<void()>& kernel);

// A kernel that is launched by name.
struct Entry {
  std::string name;           // in C++
  std::vector<size_t> sizes;  // of its parameters, in bytes
  void (*call)(void** parameters);
};

}  // namespace emulator

// Indices of the running thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
int atomicMax(int* at, int value);
#pragma GCC visibility pop
#define warpSize 32

inline void __syncthreads() {
  emulator::block_barrier();
}
inline int __syncthreads_count(int vote) {
  return emulator::block_barrier(vote != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  if (mask != 0xffffffffu) emulator::fail("only barriers of whole warps are emulated");
  emulator::warp_barrier();
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  return emulator::ballot(mask, vote != 0);
}
inline void __threadfence_block() {}
inline void __trap() {
  emulator::fail("a kernel trapped");
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulator::current->index % 32;
  return emulator::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulator::current->index % 32, source = lane ^ bits;
  return emulator::shuffle(mask, value, source / width <= lane / width ? source : -1);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulator::current->index % 32, source = lane - static_cast<int>(delta);
  return emulator::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : -1);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulator::current->index % 32, source = lane + static_cast<int>(delta);
  return emulator::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : -1);
}

namespace emulator {
template <class To, class From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof to);
  return to;
}
}  // namespace emulator

inline unsigned __float_as_uint(float v) {
  return emulator::bits_of<unsigned>(v);
}
inline float __uint_as_float(unsigned v) {
  return emulator::bits_of<float>(v);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

#endif  // CRATE_KERNELS_EMULATOR_H
