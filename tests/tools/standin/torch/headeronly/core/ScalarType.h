// Stands in for PyTorch's header of this name: the dtypes that the kernels take.
#pragma once

namespace torch::headeronly {

enum class ScalarType { Float, BFloat16, Half, Int, Long, Bool, Double };

inline const char* toString(ScalarType) {
  return "another dtype";
}

}  // namespace torch::headeronly
