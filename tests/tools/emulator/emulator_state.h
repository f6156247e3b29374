// What the parts of emulator_async.h share: who has seen what, and what is under way.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>

#include "emulator_async.h"
#include "emulator_clock.h"

namespace emulator::async {

struct Access {
  int thread;
  Step step;
  uint8_t bytes = 0xf;    // of the granule
  bool adds = false;      // by one instruction
  uint32_t shuffles = 0;  // of its warp until then
  bool by_warp = false;   // in one instruction of all its lanes
};

constexpr int kGranule = 4;  // bytes of shared memory whose accesses are followed together

struct Granule {
  Access writer = {-1, 0};
  std::vector<Access> others;   // who wrote before it in no order: other bytes, or parts of a sum
  std::vector<Access> readers;  // since it was written
  bool landing = false;         // a copy has been issued and has not landed

  void read_by(const Access& access) {
    for (Access& reader : readers) {
      if (reader.thread != access.thread) continue;
      reader.step = access.step;
      reader.shuffles = access.shuffles;
      reader.by_warp = access.by_warp;
      reader.bytes |= access.bytes;
      return;
    }
    readers.push_back(access);
  }
};

struct MBarrier {
  Access initialised = {-1, 0};
  int count = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Gathered sum, out;
};

struct Landing {
  int block;
  uint32_t to;
  std::vector<unsigned char> data;
  uint32_t barrier;
};

struct Store {
  float* global;
  uint32_t from;
  int bytes;
  Clock issue;
};

struct Copy {
  uint32_t to;
  int size;
  bool ends;  // a group
  std::array<unsigned char, 16> bytes;
};

// The sums of a chain of products that are not finished. They are NaN where the kernel can see them.
struct Chain {
  int columns, products = 0;
  std::array<float*, 128> sums;
  std::vector<float> values;  // of thread 0, of thread 1, ...
};

struct Issued {
  Product what;
  Chain* chain;
  std::array<const uint32_t*, 128> registers;
  std::vector<std::array<uint32_t, 4>> copies;  // of the registers as they were at the issue
  Clock issue;                                  // what all four warps know
  std::vector<int> runs;                        // the first granules of the 16 bytes that it reads
};

struct WarpGroup {
  Barrier barrier;
  void* mine[128] = {};
  std::vector<Issued> open;
  std::deque<std::vector<Issued>> committed;
  std::map<float*, std::unique_ptr<Chain>> chains;  // by thread 0's sums
  int fenced = 0;
  int registers = 0;  // of a thread
  bool lacks_registers = false;
};

struct BlockState {
  std::vector<Granule> granules;
  Barrier named[16];
  int expected[16] = {};
  std::map<uint32_t, MBarrier> mbarriers;
  bool mbarriers_unfenced = false;
  int free_registers = 0;  // that warp groups have given back
};

struct ThreadState {
  Clock clock;
  std::deque<Copy> copies;
  std::vector<Store> stores;
  std::deque<std::vector<Store>> committed;
};

struct State {
  Group* group = nullptr;
  bool active = false;
  std::vector<BlockState> blocks;
  std::vector<ThreadState> threads;
  std::vector<WarpGroup> warp_groups;
  std::map<const Barrier*, std::pair<Gathered, Gathered>> barriers;  // who came; who came to the last generation
  std::map<const uint32_t*, std::vector<Gathered>> counters;         // who came, after each arrival
  std::vector<Landing> landings;
  Step engine = 0;
};

extern State state;

// Of the launch: its threads; the running one among them.
int threads();
int me();
// What is kept of the running thread, its block and its warp group.
ThreadState& mine();
// An access of the running thread.
Access access_now();
BlockState& block();
WarpGroup& warp_group();
// The running thread goes on to its next step.
void step();
Granule& granule(uint32_t address);

bool read_before(const Access& reader);
// Who has written, and who has read, is ordered before the running thread.
void check_free(const Granule& g);
// An asynchronous reader: its issuer knows of the write, and of a proxy fence behind it.
void check_visible(const Granule& g, const Clock& issue);

MBarrier& mbarrier(BlockState& of, uint32_t address);
void flip_if_complete(MBarrier& m);

}  // namespace emulator::async
