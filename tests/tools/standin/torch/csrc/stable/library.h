// Stands in for PyTorch's header of this name: a list of the ops by name, and values to call them with.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

using StableIValue = uint64_t;  // the address of a Value

namespace torch::stable {

using Value = std::variant<std::monostate, bool, int64_t, double, Tensor>;
using Op = void (*)(StableIValue* stack, uint64_t count, uint64_t results);

inline std::map<std::string, Op>& ops() {
  static std::map<std::string, Op> listed;
  return listed;
}

namespace detail {

template <class T>
struct Taken {
  static T from(const Value& value) { return std::get<T>(value); }
};
template <class T>
struct Taken<std::optional<T>> {
  static std::optional<T> from(const Value& value) {
    if (std::holds_alternative<std::monostate>(value)) return {};
    return Taken<T>::from(value);
  }
};

template <class T>
T to(StableIValue value) {
  return Taken<T>::from(*reinterpret_cast<const Value*>(value));
}
template <class T>
StableIValue from(const T&);

template <auto function>
struct Boxed;

template <class... Parameters, void (*function)(Parameters...)>
struct Boxed<function> {
  static void run(StableIValue* stack, uint64_t count, uint64_t) {
    STD_TORCH_CHECK(count == sizeof...(Parameters), "expected ", sizeof...(Parameters), " arguments, got ", count);
    call(stack, std::index_sequence_for<Parameters...>());
  }
  template <size_t... index>
  static void call(StableIValue* stack, std::index_sequence<index...>) {
    function(to<std::decay_t<Parameters>>(stack[index])...);
  }
};

}  // namespace detail

struct Library {
  void def(const char*) {}
  void impl(const char* name, Op op) { ops()[name] = op; }
};

namespace detail {
using StableLibrary = Library;
}

}  // namespace torch::stable

#define CRATE_JOINED(a, b) a##b
#define CRATE_FILLED(filled, m)                                                        \
  static void filled(torch::stable::Library m);                                        \
  [[maybe_unused]] static const bool CRATE_JOINED(filled, _done) = (filled({}), true); \
  static void filled(torch::stable::Library m)
#define CRATE_NUMBERED(number, m) CRATE_FILLED(CRATE_JOINED(library_, number), m)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) CRATE_NUMBERED(__COUNTER__, m)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) CRATE_NUMBERED(__COUNTER__, m)
#define TORCH_BOX(function) (&torch::stable::detail::Boxed<function>::run)
