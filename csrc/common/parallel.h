// Work shared among PyTorch's threads.
#pragma once

#include <atomic>
#include <cstdint>

#include <torch/csrc/stable/ops.h>

#include "arena.h"

namespace crate_kernels {

// Call task(i, arena) for each i in [0, count), on at most torch.get_num_threads() threads, each with its arena.
//
// A thread takes the next task when it is free: sequences differ in length and cores in load. Which thread runs
// a task never changes a result, as long as a task writes only what is its own.
template <class Task>
void for_each_task(int64_t count, const Task& task) {
  const int64_t threads = torch::stable::get_num_threads();
  if (count <= 1 || threads <= 1) {
    Arena arena;
    for (int64_t i = 0; i < count; ++i) task(i, arena);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
    Arena arena;
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i, arena);
  });
}

}  // namespace crate_kernels
