#include "parallel.h"

#include <time.h>

namespace crate_kernels {
namespace {

// Waking a thread takes a tenth of this on a free core. A thread whose core runs another process takes longer than
// this.
constexpr int64_t kLongWait = 1000 * 1000;  // ns, of a region less what its threads ran together
// Time on one thread, as a multiple of what the last shared region lost: trying again then costs a sixteenth of it.
constexpr int64_t kAlone = 16;
// The largest loss that is counted for a region. A thread waits a few time slices for a core. A process that was
// stopped waits longer, but one thread would have been stopped as well.
constexpr int64_t kMaxLost = 50 * 1000 * 1000;  // ns

std::atomic<int64_t> alone_until{0};  // ns

int64_t nanoseconds(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return int64_t{1000} * 1000 * 1000 * time.tv_sec + time.tv_nsec;
}

}  // namespace

int64_t region_threads() {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads > 1 && nanoseconds(CLOCK_MONOTONIC) < alone_until.load(std::memory_order_relaxed)) return 1;
  return threads;
}

Shared::Shared() : start_(nanoseconds(CLOCK_MONOTONIC)) {}

Shared::~Shared() {
  const int64_t now = nanoseconds(CLOCK_MONOTONIC), lost = now - start_ - ran_.load() - still_;
  if (lost < kLongWait) return;
  alone_until.store(now + kAlone * std::min(lost, kMaxLost), std::memory_order_relaxed);
}

Shared::Worker::Worker(Shared& region)
    : region_(region), start_(nanoseconds(CLOCK_MONOTONIC)), ran_before_(nanoseconds(CLOCK_THREAD_CPUTIME_ID)) {}

Shared::Worker::~Worker() {
  const int64_t ran = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - ran_before_;
  region_.ran_ += ran;
  if (std::this_thread::get_id() == region_.caller_) {
    region_.still_ += nanoseconds(CLOCK_MONOTONIC) - start_ - ran;
  }
}

}  // namespace crate_kernels
