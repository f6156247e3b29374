// Runs the CPU kernels' operators on several threads, for ThreadSanitizer. Everything here is compiled with it.
//
//   threads LEVEL          every case at an instruction-set level
//   threads LEVEL race     a race, which must be reported
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../../../csrc/common/cpu/capability.h"
#include "cases.h"

namespace crate_kernels {
// As csrc/common/plan.h declares it; there are no plans here.
torch::stable::Op offer(const char*, torch::stable::Op kernel) {
  return kernel;
}
}  // namespace crate_kernels

// parallel.cpp is compiled with this clock: time stands still, so no region is left to one thread because another
// waited for a core.
extern "C" int frozen_clock(clockid_t, timespec* time) noexcept {
  *time = {};
  return 0;
}

// arena.cpp is compiled with this allocator: in its first task a thread waits, though not for long, for the first tasks
// of the others. On a busy machine one thread could otherwise do all tasks, and race with none. The order of relaxed
// numbers is no order of what the tasks write.
namespace {
std::atomic<int64_t> expected{0}, arrived{0};
}
extern "C" int patient_memalign(void** memory, size_t alignment, size_t size) noexcept {
  arrived.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < 1000 && arrived.load(std::memory_order_relaxed) < expected.load(std::memory_order_relaxed); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return posix_memalign(memory, alignment, size);
}

namespace torch::stable {

int64_t get_num_threads() {
  return 4;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t parts = std::min(get_num_threads(), (end - begin + grain - 1) / grain);
  if (parts <= 0) return;
  const int64_t size = (end - begin + parts - 1) / parts;
  std::atomic<int64_t> missing{parts};
  arrived = 0;
  expected = parts;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += size) {
    threads.emplace_back([&, first] {
      for (--missing; missing > 0;) std::this_thread::yield();
      body(first, std::min(first + size, end));
    });
  }
  missing -= parts - static_cast<int64_t>(threads.size());
  for (std::thread& thread : threads) thread.join();
  expected = 0;
}

}  // namespace torch::stable

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  crate_kernels::set_capability(argv[1]);
  if (argc > 2 && std::strcmp(argv[2], "race") == 0) {
    run_planted_race();
    return 0;
  }
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16}) {
    run_mssa(dtype);
    run_mssa_decode(dtype);
    run_mssa_rectangular(dtype);
    run_tssa(dtype);
    run_ista(dtype);
    std::cout << argv[1] << (dtype == ScalarType::Float ? ": float32 done\n" : ": bfloat16 done\n");
  }
}
