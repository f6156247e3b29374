#include "parallel.h"

#include <time.h>

#include <algorithm>

namespace crate_kernels {
namespace {

// Waking a thread takes a tenth of this on a free core. A thread whose core runs another process takes longer than
// this.
constexpr int64_t kLongWait = 1000 * 1000;  // ns, of a region less what its threads ran together
constexpr int kMostAlone = 64;

// Regions still to run on the calling thread alone, and the number of those after the next region that was slower
// shared.
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

Shared::Shared() : start_(nanoseconds(CLOCK_MONOTONIC)) {}

Shared::~Shared() {
  const int64_t took = nanoseconds(CLOCK_MONOTONIC) - start_;
  if (took - ran_.load() < kLongWait) {
    next_alone.store(1, std::memory_order_relaxed);
    return;
  }
  const int regions = next_alone.load(std::memory_order_relaxed);
  alone.store(regions, std::memory_order_relaxed);
  next_alone.store(std::min(2 * regions, kMostAlone), std::memory_order_relaxed);
}

Shared::Thread::Thread(Shared& region) : region_(region), ran_before_(nanoseconds(CLOCK_THREAD_CPUTIME_ID)) {}

Shared::Thread::~Thread() {
  region_.ran_ += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - ran_before_;
}

}  // namespace crate_kernels
