// Which plan a call has: its key, and the table of plans.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include "plan_program.h"
#include "tensor.h"

namespace crate_kernels {

constexpr size_t kMaxPlans = 4096, kMaxSeen = 65536;
constexpr int kMaxKeyWords = 160;

inline uint64_t mix_key(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// What decides which kernels a call launches with which parameters.
struct PlanKey {
  std::array<uint64_t, kMaxKeyWords> words;
  int count = 0;
  uint64_t hash = 0xCBF29CE484222325ull;
  bool whole = true;  // false: a tensor that has no key

  explicit PlanKey(int64_t number) { add(static_cast<uint64_t>(number)); }

  void add(uint64_t word) {
    if (count == kMaxKeyWords) {
      whole = false;
      return;
    }
    words[count++] = word;
    hash = mix_key(hash, word);
  }

  void tensor(AtenTensorHandle t) {
    static const int32_t strided = aoti_torch_layout_strided();
    int32_t layout = 0, dtype = 0, type = 0, index = 0;
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr, stored = 0, offset = 0;
    void* data = nullptr;
    if (aoti_torch_get_layout(t, &layout) != 0 || layout != strided || aoti_torch_get_dim(t, &dims) != 0 ||
        aoti_torch_get_sizes(t, &sizes) != 0 || aoti_torch_get_strides(t, &strides) != 0 ||
        aoti_torch_get_dtype(t, &dtype) != 0 || aoti_torch_get_device_type(t, &type) != 0 ||
        aoti_torch_get_device_index(t, &index) != 0 || aoti_torch_get_data_ptr(t, &data) != 0 ||
        aoti_torch_get_storage_size(t, &stored) != 0 || aoti_torch_get_storage_offset(t, &offset) != 0) {
      whole = false;
      return;
    }
    const uint64_t aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    // Threads of the CPU decide what Python chooses there.
    const uint64_t threads = type == 0 ? torch::stable::get_num_threads() : 0;
    add(static_cast<uint64_t>(dims) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(type) << 16 |
        static_cast<uint64_t>(index & 255) << 24 | aligned << 32 | threads << 40);
    for (int64_t d = 0; d < dims; ++d) {
      add(static_cast<uint64_t>(sizes[d]));
      add(static_cast<uint64_t>(strides[d]));
    }
    whole &= reach_of(dims, sizes, strides, offset, dtype) <= stored;  // Python says what was freed
  }
};

class PlanTable {
 public:
  std::shared_ptr<const Plan> find(const PlanKey& key) const {
    std::shared_lock hold(lock_);
    for (auto [at, end] = plans_.equal_range(key.hash); at != end; ++at) {
      const std::vector<uint64_t>& words = at->second->key;
      if (words.size() == static_cast<size_t>(key.count) &&
          std::memcmp(words.data(), key.words.data(), words.size() * sizeof(uint64_t)) == 0) {
        return at->second;
      }
    }
    return nullptr;
  }

  // Returns whether a key was met before. Two keys of one hash only record a plan early.
  bool meet(const PlanKey& key) {
    std::unique_lock hold(lock_);
    if (seen_.size() >= kMaxSeen) seen_.clear();
    return !seen_.insert(key.hash).second;
  }

  void put(const PlanKey& key, std::shared_ptr<Plan> plan) {
    plan->key.assign(key.words.begin(), key.words.begin() + key.count);
    std::unique_lock hold(lock_);
    for (auto [at, end] = plans_.equal_range(key.hash); at != end; ++at) {
      if (at->second->key == plan->key) return;
    }
    if (plans_.size() >= kMaxPlans) plans_.clear();
    plans_.emplace(key.hash, std::move(plan));
  }

  void clear() {
    std::unique_lock hold(lock_);
    plans_.clear();
    seen_.clear();
  }

  size_t size() const {
    std::shared_lock hold(lock_);
    return plans_.size();
  }

  // A fork copies the lock as another thread may hold it, and not that thread: its child would wait for ever.
  void before_fork() { lock_.lock(); }
  void after_fork() { lock_.unlock(); }
  void in_child() { new (&lock_) std::shared_mutex; }

 private:
  mutable std::shared_mutex lock_;
  std::unordered_multimap<uint64_t, std::shared_ptr<const Plan>> plans_;
  std::unordered_set<uint64_t> seen_;
};

}  // namespace crate_kernels
