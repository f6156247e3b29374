// emulator_async.h: clocks, barriers that count bytes, copies that land late, products of warp groups.
#include "emulator_async.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include <torch/headeronly/util/Half.h>

namespace emulator::async {
namespace {

using Step = uint32_t;

// What a thread knows: of each thread, and of the engine that copies, the last step that it is ordered behind, and the
// step of the last proxy fence. Steps begin at 1.
struct Clock {
  std::vector<Step> seen, fenced;

  void merge(const Clock& other) {
    if (other.seen.empty()) return;
    if (seen.empty()) return void(*this = other);
    for (size_t n = 0; n < seen.size(); ++n) {
      seen[n] = std::max(seen[n], other.seen[n]);
      fenced[n] = std::max(fenced[n], other.fenced[n]);
    }
  }
};

struct Access {
  int thread;
  Step step;
};

constexpr int kGranule = 4;  // bytes of shared memory whose accesses are followed together

struct Granule {
  Access writer = {-1, 0};
  std::vector<Access> readers;  // since it was written
  bool landing = false;         // a copy has been issued and has not landed
};

struct MBarrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Clock sum, out;
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
  bool adds;
  Clock issue;
};

struct Copy {
  uint32_t to;
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
  std::array<Clock, 4> issue;                   // of each warp
  std::vector<int> granules;
};

struct WarpGroup {
  Barrier barrier;
  void* mine[128] = {};
  std::vector<Issued> open;
  std::deque<std::vector<Issued>> committed;
  std::map<float*, std::unique_ptr<Chain>> chains;  // by thread 0's sums
  int fenced = 0;
};

struct BlockState {
  std::vector<Granule> granules;
  Barrier named[16];
  int expected[16] = {};
  std::map<uint32_t, MBarrier> mbarriers;
  bool mbarriers_unfenced = false;
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
  std::map<const Barrier*, std::pair<Clock, Clock>> barriers;  // of those who came; of the last completed generation
  std::vector<Landing> landings;
  Step engine = 0;
};

State state;

int threads() {
  return static_cast<int>(state.group->cluster * state.group->threads);
}

int me() {
  return static_cast<int>(current->block->rank * state.group->threads + current->index);
}

// Only launches that use this file pay for it.
void activate() {
  if (state.active) return;
  state.active = true;
  state.blocks.assign(state.group->cluster, {});
  for (unsigned n = 0; n < state.group->cluster; ++n) {
    state.blocks[n].granules.assign(state.group->blocks[n].shared_bytes / kGranule, {});
  }
  state.threads.assign(threads(), {});
  for (int n = 0; n < threads(); ++n) {
    state.threads[n].clock = {std::vector<Step>(threads() + 1), std::vector<Step>(threads() + 1)};
    state.threads[n].clock.seen[n] = 1;
  }
  state.warp_groups = std::vector<WarpGroup>(threads() / 128);
}

ThreadState& mine() {
  activate();
  return state.threads[me()];
}

BlockState& block() {
  activate();
  return state.blocks[current->block->rank];
}

WarpGroup& warp_group() {
  activate();
  if (state.group->threads % 128 != 0) fail("warp groups are of 128 threads");
  return state.warp_groups[me() / 128];
}

void step() {
  ++mine().clock.seen[me()];
}

Granule& granule(uint32_t address) {
  return block().granules[(address - kBase) / kGranule];
}

bool knows(const Clock& clock, const Access& access) {
  return access.thread < 0 || clock.seen[access.thread] >= access.step;
}

// Who has written, and who has read, is ordered before the running thread.
void check_free(const Granule& g) {
  const Clock& clock = mine().clock;
  if (g.landing) fail("shared memory is written while a copy may land there");
  if (!knows(clock, g.writer)) fail("shared memory is written twice with no barrier between");
  for (const Access& reader : g.readers) {
    if (reader.thread / 32 == me() / 32 && reader.thread < threads()) continue;  // a warp's lanes ran it together
    if (!knows(clock, reader)) fail("shared memory is written while another thread or a product may read it");
  }
}

// An asynchronous reader: its issuer knows of the write, and of a proxy fence behind it.
void check_visible(const Granule& g, const Clock& issue) {
  if (g.landing) fail("an asynchronous operation reads what has not landed");
  if (g.writer.thread < 0) return;
  const bool by_engine = g.writer.thread == threads();
  const std::vector<Step>& known = by_engine ? issue.seen : issue.fenced;
  if (known[g.writer.thread] < g.writer.step) {
    fail(by_engine ? "an asynchronous operation reads what landed, and has not waited for it"
                   : "an asynchronous operation reads what no proxy fence and barrier have ordered before it");
  }
}

void flip_if_complete(MBarrier& m) {
  if (m.pending != 0 || m.bytes != 0) return;
  m.phase ^= 1;
  m.pending = m.count;
  m.out = std::move(m.sum);
  m.sum = {};
}

MBarrier& mbarrier(BlockState& of, uint32_t address) {
  const auto found = of.mbarriers.find(address);
  if (found == of.mbarriers.end()) fail("a barrier in shared memory is used before it is initialised");
  return found->second;
}

float to_number(uint16_t bits, bool half) {
  if (half) return c10::detail::fp16_ieee_to_fp32_value(bits);
  return bits_of<float>(static_cast<uint32_t>(bits) << 16);
}

// The address of element (r, k) of an operand: r along M or N.
uint32_t place(uint64_t descriptor, bool mn_major, int r, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  const int row = mode == 0 ? 8 : 128 >> mode;  // elements of an atom's row
  uint32_t address;
  if (mode == 0) {
    const int within = mn_major ? k % 8 * 16 + r % 8 * 2 : r % 8 * 16 + k % 8 * 2;
    address = start + r / 8 * stride + k / 8 * leading + within;
  } else if (mn_major) {
    address = start + r / row * leading + k / 8 * stride + k % 8 * (row * 2) + r % row * 2;
  } else {
    address = start + r / 8 * stride + r % 8 * (row * 2) + k * 2;
  }
  return mode == 0 ? address : address ^ (address >> 7 & (row / 8 - 1)) << 4;
}

uint16_t operand_bits(Issued& issued, uint32_t address) {
  uint16_t bits;
  memcpy(&bits, at(address, 2, 2), 2);
  issued.granules.push_back(static_cast<int>((address - kBase) / kGranule));
  return bits;
}

void execute(Issued& issued) {
  static float a[64][16], b[256][16];
  const Product& p = issued.what;
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < 16; ++k) {
      if (p.a_in_registers) {
        const int thread = m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
        const uint32_t pair = issued.registers[thread][m % 16 / 8 + k / 8 * 2];
        a[m][k] = to_number(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair), p.half);
      } else {
        a[m][k] = to_number(operand_bits(issued, place(p.a, p.mn_a, m, k)), p.half);
      }
    }
  }
  for (int n = 0; n < p.columns; ++n) {
    for (int k = 0; k < 16; ++k) b[n][k] = to_number(operand_bits(issued, place(p.b, p.mn_b, n, k)), p.half);
  }
  const int count = p.columns / 2;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < count; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
      float& value = issued.chain->values[thread * count + i];
      value = static_cast<float>(p.adds ? sum + value : sum);
    }
  }
}

// The warp group has waited for a product: what it read may be written from now on, and its sums may be read.
void retire(WarpGroup& group, Issued& issued) {
  if (!device().early) execute(issued);
  for (int thread = 0; issued.what.a_in_registers && thread < 128; ++thread) {
    if (memcmp(issued.registers[thread], issued.copies[thread].data(), 16) != 0) {
      fail("registers of an operand changed before the product was waited for");
    }
  }
  std::sort(issued.granules.begin(), issued.granules.end());
  issued.granules.erase(std::unique(issued.granules.begin(), issued.granules.end()), issued.granules.end());
  const int first = me() / 128 * 128;
  for (const int n : issued.granules) {
    Granule& g = block().granules[n];
    for (const Clock& issue : issued.issue) check_visible(g, issue);
    for (int warp = 0; warp < 4; ++warp) {
      const Access reader = {first + 32 * warp, state.threads[first + 32 * warp].clock.seen[first + 32 * warp]};
      bool known = false;
      for (Access& r : g.readers) {
        if (r.thread == reader.thread) r.step = reader.step, known = true;
      }
      if (!known) g.readers.push_back(reader);
    }
  }
  Chain& chain = *issued.chain;
  if (--chain.products > 0) return;
  const int count = chain.columns / 2;
  for (int thread = 0; thread < 128; ++thread) {
    memcpy(chain.sums[thread], &chain.values[thread * count], count * sizeof(float));
  }
  group.chains.erase(chain.sums[0]);
}

}  // namespace

void start(Group& group) {
  state = {};
  state.group = &group;
}

void finish() {
  if (!state.active) return;
  const auto check = [](bool finished, const char* what) {
    if (!finished) report(what);
  };
  check(state.landings.empty(), "a block ended before a copy to its shared memory landed");
  for (const WarpGroup& group : state.warp_groups) {
    check(group.open.empty() && group.committed.empty(), "a block ended before its products");
  }
  for (const ThreadState& thread : state.threads) {
    check(thread.stores.empty() && thread.committed.empty(), "a block ended before its stores had read shared memory");
    check(thread.copies.empty(), "a block ended before its copies");
  }
}

bool land() {
  if (state.landings.empty()) return false;
  const Landing copy = state.landings.back();
  state.landings.pop_back();
  BlockState& of = state.blocks[copy.block];
  memcpy(state.group->blocks[copy.block].shared + (copy.to - kBase), copy.data.data(), copy.data.size());
  ++state.engine;
  for (size_t n = 0; n < copy.data.size(); n += kGranule) {
    Granule& g = of.granules[(copy.to - kBase + n) / kGranule];
    g.landing = false;
    g.writer = {threads(), state.engine};
    g.readers.clear();
  }
  MBarrier& m = of.mbarriers.at(copy.barrier);
  m.bytes -= static_cast<int64_t>(copy.data.size());
  Clock engine = {std::vector<Step>(threads() + 1), std::vector<Step>(threads() + 1)};
  engine.seen[threads()] = state.engine;
  m.sum.merge(engine);
  flip_if_complete(m);
  return true;
}

void arrived(const Barrier& barrier) {
  if (!state.active) return;
  state.barriers[&barrier].first.merge(mine().clock);
  step();
}

void completed(const Barrier& barrier) {
  if (!state.active) return;
  auto& [sum, out] = state.barriers[&barrier];
  out = std::move(sum);
  sum = {};
}

void ordered(const Barrier& barrier) {
  if (!state.active) return;
  mine().clock.merge(state.barriers[&barrier].second);
  step();
}

uint32_t address_of(const void* shared) {
  activate();
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - current->block->shared) + kBase;
}

unsigned char* at(uint32_t address, int64_t bytes, uint32_t alignment) {
  if (address < kBase || address - kBase + bytes > current->block->shared_bytes)
    fail("an address outside of shared memory");
  if (address % alignment != 0) fail("a misaligned address in shared memory");
  return current->block->shared + (address - kBase);
}

void wrote(uint32_t address, int bytes) {
  at(address, bytes, 1);
  for (int n = 0; n < bytes; n += kGranule) {
    Granule& g = granule(address + n);
    if (g.writer.thread / 32 == me() / 32) g.writer.thread = -1;  // a warp's lanes ran its accesses together
    check_free(g);
    g.writer = {me(), mine().clock.seen[me()]};
    g.readers.clear();
  }
}

void read(uint32_t address, int bytes) {
  at(address, bytes, 1);
  const Step now = mine().clock.seen[me()];
  for (int n = 0; n < bytes; n += kGranule) {
    Granule& g = granule(address + n);
    if (g.landing) fail("a thread reads what has not landed");
    if (g.writer.thread != me() && !knows(mine().clock, g.writer)) {
      fail("a thread reads what no barrier has ordered before it");
    }
    bool known = false;
    for (Access& r : g.readers) {
      if (r.thread == me()) r.step = now, known = true;
    }
    if (!known) g.readers.push_back({me(), now});
  }
}

namespace {

Barrier& named(int barrier, int count) {
  if (barrier < 1 || barrier > 15) fail("named barriers have the numbers 1 to 15; 0 is __syncthreads");
  if (count <= 0 || count % 32 != 0) fail("a named barrier is for whole warps");
  BlockState& of = block();
  if (of.named[barrier].arrived == 0) of.expected[barrier] = count;
  if (of.expected[barrier] != count) fail("threads name different counts for one barrier");
  return of.named[barrier];
}

}  // namespace

void named_sync(int barrier, int count) {
  wait_for(named(barrier, count), count);
}

void named_arrive(int barrier, int count) {
  arrive_at(named(barrier, count), count);
}

void proxy_fence() {
  Clock& clock = mine().clock;
  clock.fenced[me()] = clock.seen[me()];
  step();
}

void mbarrier_init(uint32_t barrier, int count) {
  at(barrier, 8, 8);
  if (count < 1) fail("a barrier in shared memory is for one arrival at least");
  MBarrier m;
  m.count = m.pending = count;
  block().mbarriers[barrier] = std::move(m);
  block().mbarriers_unfenced = true;
}

void mbarrier_fence() {
  block().mbarriers_unfenced = false;
}

void mbarrier_arrive(uint32_t barrier, int bytes) {
  if (block().mbarriers_unfenced) fail("a barrier is used before the fence behind its initialisation");
  MBarrier& m = mbarrier(block(), barrier);
  if (m.pending == 0) fail("more threads arrive at a barrier than it counts");
  m.bytes += bytes;
  --m.pending;
  m.sum.merge(mine().clock);
  step();
  flip_if_complete(m);
}

void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  MBarrier& m = mbarrier(block(), barrier);
  if (m.phase == parity) {
    const std::function<bool()> over = [&m, parity] { return m.phase != parity; };
    suspend_until(over);
  }
  mine().clock.merge(m.out);
  step();
}

void load(uint32_t shared, std::vector<unsigned char> data, uint32_t barrier) {
  if (block().mbarriers_unfenced) fail("a barrier is used before the fence behind its initialisation");
  mbarrier(block(), barrier);
  unsigned char* const to = at(shared, static_cast<int64_t>(data.size()), 16);
  for (size_t n = 0; n < data.size(); n += kGranule) {
    Granule& g = granule(shared + static_cast<uint32_t>(n));
    check_free(g);
    g.landing = true;
  }
  memset(to, 0xff, data.size());
  state.landings.push_back({static_cast<int>(current->block->rank), shared, std::move(data), barrier});
}

void store(void* global, uint32_t shared, int bytes, bool adds) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    fail("bulk copies are of multiples of 16 bytes");
  }
  at(shared, bytes, 16);
  for (int n = 0; n < bytes; n += kGranule) check_visible(granule(shared + n), mine().clock);
  mine().stores.push_back({static_cast<float*>(global), shared, bytes, adds, mine().clock});
}

void store_commit() {
  ThreadState& thread = mine();
  thread.committed.push_back(std::move(thread.stores));
  thread.stores.clear();
}

void store_wait(int groups) {
  ThreadState& thread = mine();
  for (; static_cast<int>(thread.committed.size()) > groups; thread.committed.pop_front()) {
    for (const Store& s : thread.committed.front()) {
      unsigned char* const from = at(s.from, s.bytes, 16);
      for (int n = 0; n < s.bytes; n += kGranule) {
        Granule& g = granule(s.from + n);
        check_visible(g, s.issue);
        g.readers.push_back({me(), thread.clock.seen[me()]});
      }
      if (s.adds) {
        for (int n = 0; n < s.bytes / 4; ++n) s.global[n] += reinterpret_cast<const float*>(from)[n];
      } else {
        memcpy(s.global, from, s.bytes);
      }
    }
  }
  step();
}

void copy(uint32_t shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("cp.async copies between multiples of its size");
  Copy copy = {shared, false, {}};
  if (global != nullptr) memcpy(copy.bytes.data(), global, 16);
  wrote(shared, 16);
  memset(at(shared, 16, 16), 0xff, 16);
  mine().copies.push_back(copy);
}

void copy_commit() {
  mine().copies.push_back({0, true, {}});
}

void copy_wait(int groups) {
  std::deque<Copy>& queue = mine().copies;
  int open = 0;
  for (const Copy& copy : queue) open += copy.ends;
  for (; open > groups; queue.pop_front()) {
    const Copy& copy = queue.front();
    if (copy.ends) {
      --open;
      continue;
    }
    memcpy(at(copy.to, 16, 16), copy.bytes.data(), 16);
    for (int n = 0; n < 16; n += kGranule) granule(copy.to + n).writer = {me(), mine().clock.seen[me()]};
  }
  step();
}

void by_warp_group(void* pointer, const std::function<void(void* const*)>& act) {
  WarpGroup& group = warp_group();
  group.mine[current->index % 128] = pointer;
  if (group.barrier.arrived == 127) act(group.mine);
  wait_unordered(group.barrier, 128);
}

void product_fence() {
  by_warp_group(nullptr, [](void* const*) { warp_group().fenced = true; });
}

void product(const Product& what, float* sums, const uint32_t* registers) {
  struct Mine {
    float* sums;
    const uint32_t* registers;
  } pointers = {sums, registers};
  by_warp_group(&pointers, [&what](void* const* all) {
    WarpGroup& group = warp_group();
    if (!group.fenced) fail("a product is issued with no wgmma_fence since the last wait");
    const int first = me() / 128 * 128, count = what.columns / 2;
    float* const key = static_cast<Mine*>(all[0])->sums;
    std::unique_ptr<Chain>& chain = group.chains[key];
    if (chain == nullptr) {
      chain = std::make_unique<Chain>();
      chain->columns = what.columns;
      chain->values.resize(128 * count);
      for (int thread = 0; thread < 128; ++thread) {
        float* const own = static_cast<Mine*>(all[thread])->sums;
        chain->sums[thread] = own;
        memcpy(&chain->values[thread * count], own, count * sizeof(float));
        memset(own, 0xff, count * sizeof(float));
      }
    }
    if (chain->columns != what.columns) fail("products of two widths have the same sums");
    ++chain->products;
    Issued issued = {what, chain.get(), {}, {}, {}, {}};
    for (int thread = 0; what.a_in_registers && thread < 128; ++thread) {
      issued.registers[thread] = static_cast<Mine*>(all[thread])->registers;
      issued.copies.push_back({});
      memcpy(issued.copies.back().data(), issued.registers[thread], 16);
    }
    for (int warp = 0; warp < 4; ++warp) issued.issue[warp] = state.threads[first + 32 * warp].clock;
    if (device().early) execute(issued);
    group.open.push_back(std::move(issued));
  });
}

void product_commit() {
  by_warp_group(nullptr, [](void* const*) {
    WarpGroup& group = warp_group();
    group.committed.push_back(std::move(group.open));
    group.open.clear();
  });
}

void product_wait(int groups) {
  by_warp_group(nullptr, [groups](void* const*) {
    WarpGroup& group = warp_group();
    const bool any = static_cast<int>(group.committed.size()) > groups;
    for (; static_cast<int>(group.committed.size()) > groups; group.committed.pop_front()) {
      for (Issued& issued : group.committed.front()) retire(group, issued);
    }
    if (any) group.fenced = false;
  });
  step();
}

}  // namespace emulator::async
