// CRATE_BOX(&function): TORCH_BOX for a function that takes the options of its op as one record.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

namespace crate_kernels {

// Takes the arguments of an op's call one after the other. A record of options is several arguments: it specialises
// `take`.
class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count) : next_(stack), left_(count) {}

  template <class T>
  T take() {
    STD_TORCH_CHECK(left_ > 0, "the kernel takes more arguments than its schema has");
    --left_;
    return torch::stable::detail::to<T>(*next_++);
  }

  uint64_t left() const { return left_; }

 private:
  StableIValue* next_;
  uint64_t left_;
};

// Puts what an op returns where its caller looks for it; several results specialise it.
template <class Result>
struct Returned {
  static void put(StableIValue* stack, Result result) { stack[0] = torch::stable::detail::from<Result>(result); }
};

template <auto function>
struct Box;

template <class Result, class... Parameters, Result (*function)(Parameters...)>
struct Box<function> {
  static void run(StableIValue* stack, uint64_t count, uint64_t) {
    Arguments arguments(stack, count);
    // Braces evaluate their elements from the first to the last.
    std::tuple<std::decay_t<Parameters>...> values{arguments.take<std::decay_t<Parameters>>()...};
    STD_TORCH_CHECK(arguments.left() == 0, "the schema has ", arguments.left(), " arguments more than its kernel");
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, std::move(values));
    } else {
      Returned<Result>::put(stack, std::apply(function, std::move(values)));
    }
  }
};

#define CRATE_BOX(function) (&crate_kernels::Box<function>::run)

// CRATE_IMPLEMENT(m) { m.impl(...); }: implements ops. A tensor may be on another device than their kernels by mistake:
// they are called then too, and their checks say which.
#define CRATE_IMPLEMENT(m)                                      \
  static void implement(torch::stable::detail::StableLibrary&); \
  STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, library) {    \
    implement(library);                                         \
  }                                                             \
  STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CUDA, library) {   \
    implement(library);                                         \
  }                                                             \
  STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, Meta, library) {   \
    implement(library);                                         \
  }                                                             \
  static void implement(torch::stable::detail::StableLibrary& m)

}  // namespace crate_kernels
