// Shares work among PyTorch's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>

#include <torch/csrc/stable/ops.h>

#include "arena.h"

namespace crate_kernels {

// Number of threads for the next region: PyTorch's number, or one for a while after a region that was slower shared.
//
// A region ends with its last thread. Until then OpenMP's threads spin, for milliseconds. If other processes use the
// cores, two threads can take longer than one: the region then takes longer than the sum of its threads' running times.
// The difference is the loss. After a loss, the calling thread works alone for a multiple of it. Time for which the
// calling thread itself had tasks and did not run is no loss: one thread would have waited too. A loss that is short
// beside the region is ignored.
int64_t region_threads();

// Compares the time of a shared region with the time that its threads ran.
class Shared {
 public:
  Shared();
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  // Lives on each thread of the region while that thread has tasks.
  class Worker {
   public:
    explicit Worker(Shared& region);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

   private:
    Shared& region_;
    int64_t start_, ran_before_;  // ns
  };

 private:
  const std::thread::id caller_ = std::this_thread::get_id();
  int64_t start_;                // ns
  int64_t still_ = 0;            // ns that the caller had tasks and did not run
  std::atomic<int64_t> ran_{0};  // ns, of all threads
};

// Calls task(i, arena) for each i in [0, count), on at most torch.get_num_threads() threads, and at most
// `maximum`. Each thread has an arena.
//
// A free thread takes the next task: sequences differ in length and cores in load. Results do not depend on the thread
// that runs a task, as long as each task writes only its own part.
template <class Task>
void for_each_task(int64_t count, const Task& task, int64_t maximum = INT64_MAX) {
  const int64_t useful = std::min(count, maximum), threads = useful <= 1 ? 1 : std::min(useful, region_threads());
  if (threads <= 1) {
    Arena arena;
    for (int64_t i = 0; i < count; ++i) task(i, arena);
    return;
  }
  std::atomic<int64_t> next{0};
  // Relaxed: tasks do not wait for one another, so a race between two of them is one on every machine.
  const auto take = [&next] { return next.fetch_add(1, std::memory_order_relaxed); };
  Shared region;
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // of the first thread that fails: the stable interface does not pass it on
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const Shared::Worker thread(region);
    try {
      Arena arena;
      for (int64_t i = take(); i < count; i = take()) task(i, arena);
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
      next = count;
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace crate_kernels
