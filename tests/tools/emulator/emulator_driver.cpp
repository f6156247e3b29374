// The functions of the CUDA driver that launches by crate_kernels/_cuda and by plans call, for the device that a test
// sets. A kernel's handle is its Entry.
#include <exception>
#include <set>
#include <string>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace {

// As csrc/common/plan_driver.h has them.
struct DriverAttribute {
  int id, pad;
  unsigned value[16];
};
struct DriverConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  DriverAttribute* attributes;
  unsigned count;
};
constexpr int kClusterSize = 4, kFailed = 999;

std::string failure;
std::set<const void*> entries;

// Calls f with the launch as CUDA's runtime has it. Returns an error of CUDA, or kFailed where a kernel failed.
template <class F>
int with_config(const DriverConfig& from, F f) {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(from.grid[0], from.grid[1], from.grid[2]);
  config.blockDim = dim3(from.block[0], from.block[1], from.block[2]);
  config.dynamicSmemBytes = from.shared_bytes;
  for (unsigned n = 0; n < from.count; ++n) {
    if (from.attributes[n].id != kClusterSize) continue;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {from.attributes[n].value[0], 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  try {
    const int status = f(config);
    cudaGetLastError();  // which is the runtime's alone
    return status;
  } catch (const std::exception& error) {
    failure = error.what();
    return kFailed;
  }
}

}  // namespace

namespace emulator {

const Entry* entry_at(const void* address) {
  return entries.count(address) != 0 ? static_cast<const Entry*>(address) : nullptr;
}

}  // namespace emulator

namespace crate_kernels::emulated {

__attribute__((visibility("default"))) int64_t products = 0;  // as emulator_mma.h declares it

}  // namespace crate_kernels::emulated

EMULATED_API int emulated_launch(const DriverConfig* from, const emulator::Entry* kernel, void** parameters, void**) {
  return with_config(*from, [&](const cudaLaunchConfig_t& config) -> int {
    entries.insert(kernel);
    const cudaError_t error = emulator::check(config, kernel);
    if (error == cudaSuccess) emulator::run(config, [&] { kernel->call(parameters); });
    return error;
  });
}

EMULATED_API int emulated_parameter(const emulator::Entry* kernel, size_t index, size_t* offset, size_t* size) {
  if (index >= kernel->sizes.size()) return cudaErrorInvalidValue;
  *offset = 0;
  *size = kernel->sizes[index];
  return cudaSuccess;
}

EMULATED_API int emulated_allow(const emulator::Entry* kernel, int shared_bytes) {
  const int status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaGetLastError();
  return status;
}

EMULATED_API int emulated_clusters(const emulator::Entry* kernel, const DriverConfig* from) {
  int count = 0;
  const int status = with_config(*from, [&](const cudaLaunchConfig_t& config) -> int {
    const cudaError_t error = emulator::check(config, kernel);
    if (error == cudaSuccess) count = emulator::device().multiprocessors / emulator::cluster_of(config);
    return error;
  });
  return status == 0 ? count : 0;
}

EMULATED_API const char* emulated_failure() {
  return failure.c_str();
}

EMULATED_API int emulated_fact(int which) {
  const emulator::Device& device = emulator::device();
  const int facts[] = {device.capability, device.multiprocessors, device.shared_limit};
  return facts[which];
}
