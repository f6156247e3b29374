// Launches kernels on the tensors' device and its current stream, and checks every launch. Grids are one-dimensional.
//
// g++ includes tests/tools/emulator/emulator.h first, in place of the CUDA runtime: the same launchers run on the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>

#include "../given.h"

namespace crate_kernels {

// The type of device that kernels run on.
inline int32_t device_type() {
#ifdef __CUDACC__
  return aoti_torch_device_type_cuda();
#else
  return aoti_torch_device_type_cpu();
#endif
}

// Clears the error that it reports: the check after the next launch must not find it again.
#define CRATE_CUDA_CHECK(call)                                             \
  do {                                                                     \
    const cudaError_t crate_error = call;                                  \
    if (crate_error != cudaSuccess) static_cast<void>(cudaGetLastError()); \
    STD_CUDA_CHECK(crate_error);                                           \
  } while (0)

// Makes the operands' device current while this object lives. PyTorch's CUDA runtime and ours, which is linked
// statically, are separate: both are told. PyTorch's restores the earlier device.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : guard_(device) { CRATE_CUDA_CHECK(cudaSetDevice(device)); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int device_attribute(cudaDeviceAttr attribute, int32_t device) {
  int value = 0;
  CRATE_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Bytes of shared memory that one block can have at most.
inline int shared_limit(int32_t device) {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

inline int multiprocessors(int32_t device) {
  return device_attribute(cudaDevAttrMultiProcessorCount, device);
}

template <class = void>
__global__ void capability_probe() {}

// 75, 80, 90, ...: the architecture that the code for `device` was compiled for, equal to __CUDA_ARCH__ / 10 in
// kernels. A newer device may run older code.
inline int compute_capability(int32_t device) {
  const OnDevice on(device);
  cudaFuncAttributes attributes = {};
  CRATE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&capability_probe<>)));
  return attributes.ptxVersion;
}

struct Launch {
  int64_t grid;  // blocks; 0: no launch
  int threads;   // per block: whole warps
  int64_t shared_bytes = 0;
  int cluster = 1;  // blocks that can read each other's shared memory
  cudaStream_t stream = nullptr;
};

// One kernel that the library launches, under its C++ name, for kernel_attributes.
struct KernelEntry {
  std::string name;
  const void* function;
};

inline std::vector<KernelEntry>& kernel_entries() {
  static std::vector<KernelEntry> entries;
  return entries;
}

template <auto kernel>
struct RegisteredKernel {
  static bool enter() {
    const std::string text = __PRETTY_FUNCTION__;  // "... [with auto kernel = crate_kernels::...]"; clang omits "with"
    const size_t start = text.find("kernel = ") + 9;
    kernel_entries().push_back({text.substr(start, text.rfind(']') - start), reinterpret_cast<const void*>(kernel)});
    return true;
  }
  static inline const bool entered = enter();
};

template <auto kernel>
void allow_shared_memory(int64_t bytes) {
  if (bytes <= 48 * 1024) return;  // a kernel may use this much without asking
  CRATE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

struct LaunchConfig {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};

  explicit LaunchConfig(const Launch& l) {
    config.gridDim = dim3(static_cast<unsigned>(l.grid), 1, 1);
    config.blockDim = dim3(static_cast<unsigned>(l.threads), 1, 1);
    config.dynamicSmemBytes = static_cast<size_t>(l.shared_bytes);
    config.stream = l.stream;
    if (l.cluster > 1) {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(l.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      config.attrs = &attribute;
      config.numAttrs = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

// launch<kernel>({.grid, .threads, ...}, arguments...). A kernel template is named with its template arguments.
template <auto kernel, class... Arguments>
void launch(const Launch& l, Arguments&&... arguments) {
  static_cast<void>(&RegisteredKernel<kernel>::entered);
  if (l.grid == 0) return;
  STD_TORCH_CHECK(l.grid > 0 && l.grid <= 0x7fffffff, "a grid can have 2^31 - 1 blocks at most, not ", l.grid);
  allow_shared_memory<kernel>(l.shared_bytes);
  const LaunchConfig c(l);
  static_cast<void>(cudaLaunchKernelEx(&c.config, kernel, std::forward<Arguments>(arguments)...));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Number of clusters of this launch that `device` holds at once; 0 if it holds none.
template <auto kernel>
int active_clusters(const Launch& l, int32_t device) {
  if (l.shared_bytes > shared_limit(device)) return 0;
  allow_shared_memory<kernel>(l.shared_bytes);
  const LaunchConfig c(l);
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &c.config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // a cluster that is too large is an answer, not an error
    return 0;
  }
  return count;
}

}  // namespace crate_kernels
