// Runs the CPU kernels' operators on several threads, for ThreadSanitizer. Everything here is compiled with it.
//
//   threads LEVEL          every case at an instruction-set level
//   threads LEVEL race     a race, which must be reported
#include <time.h>

#include <atomic>
#include <cstring>
#include <iostream>
#include <thread>
#include <vector>

#include "../../../csrc/common/cpu/capability.h"
#include "cases.h"

// parallel.cpp is compiled with this clock: time stands still, so no region is given to one thread because another
// waited for a core.
extern "C" int frozen_clock(clockid_t, timespec* time) noexcept {
  *time = {};
  return 0;
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
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += size) {
    threads.emplace_back([&, first] {
      for (--missing; missing > 0;) std::this_thread::yield();
      body(first, std::min(first + size, end));
    });
  }
  missing -= parts - static_cast<int64_t>(threads.size());
  for (std::thread& thread : threads) thread.join();
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
    run_mssa_rectangular(dtype);
    run_tssa(dtype);
    run_ista(dtype);
    std::cout << argv[1] << (dtype == ScalarType::Float ? ": float32 done\n" : ": bfloat16 done\n");
  }
}
