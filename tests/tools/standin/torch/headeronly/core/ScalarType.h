// Stands in for PyTorch's header of this name: the dtypes that the kernels take.
#pragma once

namespace torch::headeronly {

enum class ScalarType { Float, BFloat16, Half, Int, Long, Bool };

}  // namespace torch::headeronly
