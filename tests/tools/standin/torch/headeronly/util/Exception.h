// Stands in for PyTorch's header of this name: a check that throws its message.
#pragma once

#include <sstream>
#include <stdexcept>

namespace torch::headeronly {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace torch::headeronly

#define STD_TORCH_CHECK(condition, ...) \
  if (!(condition)) torch::headeronly::fail(__VA_ARGS__)
