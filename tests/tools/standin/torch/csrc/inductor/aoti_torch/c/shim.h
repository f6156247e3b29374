// Stands in for PyTorch's header of this name: every tensor is on the CPU.
#pragma once

#include <cstdint>

inline int32_t aoti_torch_device_type_cpu() {
  return 0;
}
inline int32_t aoti_torch_device_type_cuda() {
  return 1;
}
inline int32_t aoti_torch_device_type_meta() {
  return 2;
}
inline int aoti_torch_get_device_type(const void*, int32_t* type) {
  *type = aoti_torch_device_type_cpu();
  return 0;
}

#define TORCH_ERROR_CODE_CHECK(call) call
