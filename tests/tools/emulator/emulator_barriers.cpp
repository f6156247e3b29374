// Barriers of blocks, clusters and warps, counters of blocks, and operations of all lanes of a warp: emulator.h.
#include "emulator_async.h"

namespace emulator {

int block_barrier(bool vote) {
  Block& block = *current->block;
  int& votes = block.votes[block.barrier.generation % 2];
  if (block.barrier.arrived == 0) votes = 0;
  votes += vote;
  wait_for(block.barrier, block.live);
  return votes;
}

void cluster_barrier() {
  wait_for(current->block->cluster->barrier, current->block->cluster->live);
}

void wait_for(Barrier& barrier, int count) {
  async::arrived(barrier);
  wait_unordered(barrier, count);
  async::ordered(barrier);
}

void counter_arrive(uint32_t* counter) {
  ++*counter;
  async::counted(counter);
}

void counter_wait(const uint32_t* counter, uint32_t minimum) {
  const std::function<bool()> ready = [=] { return *counter >= minimum; };
  if (!ready()) suspend_until(ready);
  async::waited(counter, minimum);
}

void warp_barrier() {
  Warp& warp = *current->warp;
  if (warp.live < 32) fail("a lane has returned while its warp waits for it");
  if (warp.barrier.arrived > 0) fail("lanes of a warp wait for each other in different operations");
  wait_for(warp.sync, 32);
}

void collective(void* mine, void (*act)(void* const*), bool shuffles) {
  Warp& warp = *current->warp;
  if (warp.live < 32) fail("a lane has returned while its warp waits for it");
  if (warp.barrier.arrived > 0 && warp.act != act) fail("lanes of a warp wait for each other in different operations");
  if (warp.sync.arrived > 0) fail("lanes of a warp wait for each other in different operations");
  warp.act = act;
  warp.lanes[current->index % 32] = mine;
  if (warp.barrier.arrived == 31) {
    warp.shuffles += shuffles;
    warp.acts = true;
    act(warp.lanes);
    warp.acts = false;
  }
  wait_unordered(warp.barrier, 32);
}

unsigned ballot(unsigned mask, bool vote) {
  struct Vote {
    bool vote;
    unsigned result;
  } mine = {vote, 0};
  if (mask != 0xffffffffu) fail("only votes of whole warps are emulated");
  collective(
      &mine,
      [](void* const* lanes) {
        unsigned result = 0;
        for (int n = 0; n < 32; ++n) result |= static_cast<unsigned>(static_cast<Vote*>(lanes[n])->vote) << n;
        for (int n = 0; n < 32; ++n) static_cast<Vote*>(lanes[n])->result = result;
      },
      true);
  return mine.result;
}

}  // namespace emulator

int atomicMax(int* at, int value) {  // blocks and threads run one after another
  emulator::async::added(at, sizeof *at);
  const int before = *at;
  *at = before < value ? value : before;
  return before;
}
