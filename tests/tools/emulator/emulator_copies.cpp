// emulator_async.h: copies between global and shared memory, which land, or read, as late as they may.
#include <cstring>

#include "emulator_state.h"

namespace emulator::async {

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
  m.sum.add(threads(), state.engine);
  flip_if_complete(m);
  return true;
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
  state.landings.push_back({static_cast<int>(current->block->number), shared, std::move(data), barrier});
}

void add(float* global, uint32_t shared, int bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    fail("bulk copies are of multiples of 16 bytes");
  }
  at(shared, bytes, 16);
  for (int n = 0; n < bytes; n += kGranule) check_visible(granule(shared + n), mine().clock);
  mine().stores.push_back({global, shared, bytes, mine().clock});
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
        g.readers.push_back({me(), thread.clock.seen(me())});
      }
      added(s.global, s.bytes);
      for (int n = 0; n < s.bytes / 4; ++n) s.global[n] += reinterpret_cast<const float*>(from)[n];
    }
  }
  step();
}

void copy(uint32_t shared, const void* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % bytes != 0) fail("cp.async copies between multiples of its size");
  Copy copy = {shared, bytes, false, {}};
  if (global != nullptr) {
    touched(global, bytes);
    memcpy(copy.bytes.data(), global, bytes);
  }
  wrote(shared, bytes);
  memset(at(shared, bytes, bytes), 0xff, bytes);
  mine().copies.push_back(copy);
}

void copy_commit() {
  mine().copies.push_back({0, 0, true, {}});
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
    memcpy(at(copy.to, copy.size, copy.size), copy.bytes.data(), copy.size);
    for (int n = 0; n < copy.size; n += kGranule) granule(copy.to + n).writer = {me(), mine().clock.seen(me())};
  }
  step();
}

}  // namespace emulator::async
