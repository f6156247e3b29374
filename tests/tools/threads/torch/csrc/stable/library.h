// Stands in for PyTorch's header of this name. Cases call the ops as functions: nothing is registered.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

using StableIValue = uint64_t;

namespace torch::stable::detail {

template <class T>
T to(StableIValue);
template <class T>
StableIValue from(const T&);

}  // namespace torch::stable::detail

struct NoLibrary {
  void def(const char*) {}
  template <class Function>
  void impl(const char*, Function) {}
};

#define CRATE_JOINED(a, b) a##b
#define CRATE_NAMED(a, b) CRATE_JOINED(a, b)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) [[maybe_unused]] static void CRATE_NAMED(defined_, __LINE__)(NoLibrary m)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) \
  [[maybe_unused]] static void CRATE_NAMED(implemented_, __LINE__)(NoLibrary m)
#define TORCH_BOX(function) (function)
