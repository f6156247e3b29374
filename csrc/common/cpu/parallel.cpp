#include "parallel.h"

#include <time.h>

#include <algorithm>

namespace crate_kernels {
namespace {

// Waking a thread takes a tenth of this on a free core. A thread whose core runs another process takes longer than
// this.
constexpr int64_t kLongWait = 1000 * 1000;  // ns
constexpr int kMostAlone = 64;

// Regions still to run on the calling thread alone, and the number of those after the next long wait.
std::atomic<int> alone{0}, next_alone{1};

int64_t nanoseconds(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return int64_t{1000} * 1000 * 1000 * time.tv_sec + time.tv_nsec;
}

}  // namespace

int64_t region_threads() {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads > 1 && alone.load(std::memory_order_relaxed) > 0) {
    alone.fetch_sub(1, std::memory_order_relaxed);
    return 1;
  }
  return threads;
}

Waiting::Waiting() : start_(nanoseconds(CLOCK_MONOTONIC)) {}

Waiting::~Waiting() {
  if (longest_.load() < kLongWait) {
    next_alone.store(1, std::memory_order_relaxed);
    return;
  }
  const int regions = next_alone.load(std::memory_order_relaxed);
  alone.store(regions, std::memory_order_relaxed);
  next_alone.store(std::min(2 * regions, kMostAlone), std::memory_order_relaxed);
}

Waiting::Thread::Thread(Waiting& region) : region_(region), ran_before_(nanoseconds(CLOCK_THREAD_CPUTIME_ID)) {}

Waiting::Thread::~Thread() {
  const int64_t ran = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - ran_before_;
  const int64_t waited = nanoseconds(CLOCK_MONOTONIC) - region_.start_ - ran;
  int64_t longest = region_.longest_.load();
  while (waited > longest && !region_.longest_.compare_exchange_weak(longest, waited)) {
  }
}

}  // namespace crate_kernels
