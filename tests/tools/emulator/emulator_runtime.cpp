// The parts of the CUDA runtime and of PyTorch's CUDA half that emulator.h needs, for the device that a test sets.
#include <cstdlib>
#include <map>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "../../../csrc/common/cuda/launch.cuh"

namespace emulator {

Device& device() {
  static Device it;
  return it;
}

namespace {

std::map<const void*, int64_t>& allowed_bytes() {
  static std::map<const void*, int64_t> it;
  return it;
}

// Kernels launched since a test last asked: functions, or entries.
std::vector<const void*> launched;

cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace

// Refuses the launches that the device would refuse.
cudaError_t check(const cudaLaunchConfig_t& config, const void* function) {
  const unsigned cluster = cluster_of(config), threads = config.blockDim.x;
  const auto allowed = allowed_bytes().find(function);
  const int64_t limit =
      allowed == allowed_bytes().end() ? 48 * 1024 : std::min<int64_t>(allowed->second, device().shared_limit);
  if (threads == 0 || threads > 1024 || threads % 32 != 0) return remember(cudaErrorInvalidConfiguration);
  if (cluster > 1 && device().capability < 90) return remember(cudaErrorInvalidConfiguration);
  if (cluster == 0 || cluster > 8 || config.gridDim.x % cluster != 0) return remember(cudaErrorInvalidConfiguration);
  if (static_cast<int64_t>(config.dynamicSmemBytes) > limit) return remember(cudaErrorInvalidValue);
  launched.push_back(function);
  return cudaSuccess;
}

namespace {

void set_device(int64_t capability, int64_t multiprocessors, int64_t shared_limit, bool descending, bool early) {
  device() = {static_cast<int>(capability), static_cast<int>(multiprocessors), static_cast<int>(shared_limit),
              descending, early};
}

// Returns the previous capability.
int64_t set_capability(int64_t capability) {
  const int before = device().capability;
  device().capability = static_cast<int>(capability);
  return before;
}

// Returns the names of the kernels launched since the last call, one per line.
std::string launches() {
  std::string names;
  for (const void* function : launched) {
    if (const Entry* entry = entry_at(function)) names += entry->name + "\n";
    for (const crate_kernels::KernelEntry& entry : crate_kernels::kernel_entries()) {
      if (entry.function == function) names += entry.name + "\n";
    }
  }
  launched.clear();
  return names;
}

}  // namespace
}  // namespace emulator

cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = emulator::last_error;
  emulator::last_error = cudaSuccess;
  return error;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const emulator::Device& device = emulator::device();
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_limit;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = device.multiprocessors;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > emulator::device().shared_limit) return emulator::remember(cudaErrorInvalidValue);
  emulator::allowed_bytes()[function] = value;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = emulator::device().capability;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t bytes) {
  const int64_t shared = bytes == 0 ? 32 : emulator::device().shared_limit / static_cast<int64_t>(bytes);
  *blocks = static_cast<int>(std::min<int64_t>(shared, 2048 / threads));
  return cudaSuccess;
}

extern "C" {

AOTITorchError emulated_current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

AOTITorchError emulated_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return 0;
}

AOTITorchError emulated_delete_device_guard(DeviceGuardHandle) {
  return 0;
}

AOTITorchError emulated_check_message(int32_t error, const char* file, const char*, uint32_t line, bool,
                                      char** message) {
  *message = nullptr;
  if (error == 0) return 0;
  const std::string text = "CUDA error " + std::to_string(error) + " at " + file + ":" + std::to_string(line);
  *message = strdup(text.c_str());
  return 0;
}

void emulated_free_message(char* message) {
  std::free(message);
}
}

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("emulated_device(int capability, int multiprocessors, int shared_limit, bool descending, bool early) -> ()");
  m.def("emulated_capability(int capability) -> int");
  m.def("emulated_launches() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("emulated_device", TORCH_BOX(&emulator::set_device));
  m.impl("emulated_capability", TORCH_BOX(&emulator::set_capability));
  m.impl("emulated_launches", TORCH_BOX(&emulator::launches));
}
