// Stands in for PyTorch's header of this name: its parallel loop, by threads that ThreadSanitizer knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include <torch/csrc/stable/tensor.h>

namespace torch::stable {

int64_t get_num_threads();

// Calls body(begin, end) on parts of [begin, end), each on another thread. All threads exist before the first part
// starts: nothing but the library's own order is then between two parts.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace torch::stable
