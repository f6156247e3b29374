// The ops that programs of torch.export and torch.jit.trace call, for processes without Python: elsewhere the package
// defines and implements them. crate_kernels_define_operators() of exported.cpp defines them here.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/csrc/stable/ops.h>

#include "../box.h"
#include "../plan.h"
#include "../tensor.h"

namespace crate_kernels {

template <class... Results>
struct Returned<std::tuple<Results...>> {
  static void put(StableIValue* stack, std::tuple<Results...> results) {
    torch::stable::detail::box_from_tuple(stack, std::move(results));
  }
};

struct ExportedOp {
  const char* schema;
  void (*kernel)(StableIValue* stack, uint64_t arguments, uint64_t results);
};

// Adds an op to those that will be defined. Returns its number.
int add_exported(ExportedOp op);

// Calls an op by its name. Every argument of its schema is passed: there are no defaults here.
template <class Result, class... Arguments>
Result dispatch(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  if constexpr (!std::is_void_v<Result>) return torch::stable::detail::to<Result>(stack[0]);
}

// Runs a kernel of this library by the name of its op. Its messages pass, which the dispatcher would replace.
template <class... Arguments>
void run_kernel(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  offered(name)(stack.data(), stack.size(), 0);
}

// Refuses a program that names a backend that is written in Python.
inline void check_backend(const char* call, const std::string& backend) {
  if (backend == "cpp" || backend.substr(0, backend.find(':')) == "auto") return;
  throw std::runtime_error(std::string(call) + ": backend='" + backend +
                           "' needs Python; export with backend=None or 'cpp', where the extension is built");
}

inline Tensor cast(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(torch::stable::contiguous(*t)) : std::nullopt;
}

// Memory for an output of attention: of the sizes of `w`, and so laid out that merging heads is a view.
inline Tensor empty_out(const Tensor& w) {
  if (w.dim() != 4) return torch::stable::new_empty(w, w.sizes());
  return torch::stable::transpose(torch::stable::new_empty(w, {w.size(0), w.size(2), w.size(1), w.size(3)}), 1, 2);
}

// Memory for a number per head and token: (batch, nheads, seqlen), or (nheads, total) if they are packed.
inline Tensor empty_rows(const Tensor& w) {
  if (w.dim() != 4) return torch::stable::new_empty(w, {w.size(1), w.size(0)}, ScalarType::Float);
  return torch::stable::new_empty(w, {w.size(0), w.size(1), w.size(2)}, ScalarType::Float);
}

}  // namespace crate_kernels
