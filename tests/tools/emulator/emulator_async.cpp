// emulator_async.h: clocks, accesses to shared memory, and barriers.
#include <algorithm>

#include "emulator_state.h"

namespace emulator::async {

State state;

int threads() {
  return static_cast<int>(state.group->count * state.group->threads);
}

int me() {
  return static_cast<int>(current->block->number * state.group->threads + current->index);
}

namespace {

constexpr int kRegisters = 65536;  // of a multiprocessor

// Only launches that use this file pay for it.
void activate() {
  if (state.active) return;
  state.active = true;
  state.blocks.assign(state.group->count, {});
  for (unsigned n = 0; n < state.group->count; ++n) {
    state.blocks[n].granules.assign(state.group->blocks[n].shared_bytes / kGranule, {});
  }
  state.threads.assign(threads(), {});
  const std::vector<Step> none(threads() + 1);
  const auto nothing = std::make_shared<Known>(Known{none, none});
  for (int n = 0; n < threads(); ++n) state.threads[n].clock = Clock(nothing, n);
  state.warp_groups = std::vector<WarpGroup>(threads() / 128);
  const int share = kRegisters / static_cast<int>(state.group->threads) / 8 * 8;
  for (WarpGroup& group : state.warp_groups) group.registers = std::min(share, 256);
}

bool knows(const Clock& clock, const Access& access) {
  return access.thread < 0 || clock.seen(access.thread) >= access.step;
}

}  // namespace

ThreadState& mine() {
  activate();
  return state.threads[me()];
}

BlockState& block() {
  activate();
  return state.blocks[current->block->number];
}

WarpGroup& warp_group() {
  activate();
  if (state.group->threads % 128 != 0) fail("warp groups are of 128 threads");
  return state.warp_groups[me() / 128];
}

Access access_now() {
  const Warp& warp = *current->warp;
  return {me(), mine().clock.seen(me()), 0xf, false, warp.shuffles, warp.acts};
}

void step() {
  mine().clock.step();
}

Granule& granule(uint32_t address) {
  return block().granules[(address - kBase) / kGranule];
}

// A lane of the warp has read it before the running lane goes on: it has shuffled what it read, or all read as one.
bool read_before(const Access& reader) {
  return reader.thread / 32 == me() / 32 && (reader.by_warp || reader.shuffles < current->warp->shuffles);
}

void check_free(const Granule& g) {
  const Clock& clock = mine().clock;
  if (g.landing) fail("shared memory is written while a copy may land there");
  if (!knows(clock, g.writer)) fail("shared memory is written twice with no barrier between");
  for (const Access& reader : g.readers) {
    if (!read_before(reader) && !knows(clock, reader))
      fail("shared memory is written while another thread or a product may read it");
  }
}

// An asynchronous reader: its issuer knows of the write, and of a proxy fence behind it.
void check_visible(const Granule& g, const Clock& issue) {
  if (g.landing) fail("an asynchronous operation reads what has not landed");
  if (g.writer.thread < 0) return;
  const bool by_engine = g.writer.thread == threads();
  const int writer = g.writer.thread;
  if ((by_engine ? issue.seen(writer) : issue.fenced(writer)) < g.writer.step) {
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
  if (found == of.mbarriers.end() || !knows(mine().clock, found->second.initialised)) {
    fail("a barrier in shared memory is used before it is initialised");
  }
  return found->second;
}

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
  check_peers();
}

void arrived(const Barrier& barrier) {
  if (!state.active) return;
  state.barriers[&barrier].first.add(mine().clock);
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
  mine().clock.join(state.barriers[&barrier].second);
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
  const Access access = access_now();
  for (int n = 0; n < bytes; n += kGranule) {
    Granule& g = granule(address + n);
    check_free(g);
    g.writer = access;
    g.readers.clear();
  }
}

void read(uint32_t address, int bytes) {
  at(address, bytes, 1);
  const Clock& clock = mine().clock;
  const Access access = access_now();
  for (int n = 0; n < bytes; n += kGranule) {
    Granule& g = granule(address + n);
    if (g.landing) fail("a thread reads what has not landed");
    if (g.writer.thread != access.thread && !knows(clock, g.writer)) {
      fail("a thread reads what no barrier has ordered before it");
    }
    g.read_by(access);
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
  mine().clock.fence();
  step();
}

void mbarrier_init(uint32_t barrier, int count) {
  at(barrier, 8, 8);
  if (count < 1) fail("a barrier in shared memory is for one arrival at least");
  MBarrier m;
  m.count = m.pending = count;
  m.initialised = access_now();
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
  m.sum.add(mine().clock);
  step();
  flip_if_complete(m);
}

void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  MBarrier& m = mbarrier(block(), barrier);
  if (m.phase == parity) {
    const std::function<bool()> over = [&m, parity] { return m.phase != parity; };
    suspend_until(over);
  }
  mine().clock.join(m.out);
  step();
}

void more_registers(int count) {
  by_warp_group(nullptr, [count](void* const*) {
    WarpGroup& group = warp_group();
    BlockState& of = block();
    const int more = 128 * (count - group.registers);
    if (more < 0) fail("a warp group asks for fewer registers than it has");
    const std::function<bool()> enough = [&of, more] { return of.free_registers >= more; };
    group.lacks_registers = true;
    if (!enough()) suspend_until(enough);
    group.lacks_registers = false;
    of.free_registers -= more;
    group.registers = count;
  });
}

void fewer_registers(int count) {
  by_warp_group(nullptr, [count](void* const*) {
    WarpGroup& group = warp_group();
    if (count > group.registers) fail("a warp group gives back registers that it does not have");
    block().free_registers += 128 * (group.registers - count);
    group.registers = count;
  });
}

bool lacks_registers() {
  for (const WarpGroup& group : state.warp_groups) {
    if (group.lacks_registers) return true;
  }
  return false;
}

}  // namespace emulator::async
