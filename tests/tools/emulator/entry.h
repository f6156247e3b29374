// A kernel behind the interface of the CUDA driver: what each unit of gpu.py begins with. It is compiled once, with
// what the kernels' headers include.
#ifndef CRATE_KERNELS_EMULATOR_ENTRY_H  // `once` is for files that are not compiled by themselves
#define CRATE_KERNELS_EMULATOR_ENTRY_H

#include <cstddef>
#include <string>
#include <tuple>
#include <utility>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "emulator.h"

namespace emulator {

template <class T>
struct Copy {  // of a parameter, which need not be aligned
  alignas(T) unsigned char bytes[sizeof(T)];

  explicit Copy(const void* from) { std::memcpy(bytes, from, sizeof(T)); }
  T& value() { return *reinterpret_cast<T*>(bytes); }
};

template <auto kernel, class... P, size_t... I>
void call(void (*)(P...), void** parameters, std::index_sequence<I...>) {
  std::tuple<Copy<std::decay_t<P>>...> copies(parameters[I]...);
  kernel(std::get<I>(copies).value()...);
}

template <auto kernel, class... P>
void call(void (*function)(P...), void** parameters) {
  call<kernel>(function, parameters, std::index_sequence_for<P...>());
}

template <class... P>
std::vector<size_t> sizes_of(void (*)(P...)) {
  return {sizeof(P)...};
}

template <auto kernel>
std::string name_of() {
  const std::string text = __PRETTY_FUNCTION__;  // "... [with auto kernel = crate_kernels::...; std::string = ...]"
  const size_t start = text.find("kernel = ") + 9;
  return text.substr(start, text.find(';', start) - start);
}

template <auto kernel>
Entry entry() {
  return {name_of<kernel>(), sizes_of(kernel), [](void** parameters) { call<kernel>(kernel, parameters); }};
}

}  // namespace emulator

// emulated_entry() is the handle of a kernel: its function, to the driver.
#define EMULATED_ENTRY(...)                                                                   \
  extern "C" __attribute__((visibility("default"))) const emulator::Entry* emulated_entry() { \
    static const emulator::Entry it = emulator::entry<__VA_ARGS__>();                         \
    return &it;                                                                               \
  }

#endif  // CRATE_KERNELS_EMULATOR_ENTRY_H
