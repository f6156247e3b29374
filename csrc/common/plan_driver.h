// What plans call outside this library, found as it is loaded: the CUDA driver, and PyTorch's arithmetic.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace crate_kernels {
namespace {

// ---- The driver: as much of cuda.h as a launch takes. ----

struct Attribute {
  int id, pad;
  union {
    char bytes[64];
    unsigned cluster[3];
    int value;
  };
};
enum : int { kCooperative = 2, kClusterSize = 4, kClusterSchedule = 5, kSerialization = 6, kSpread = 1 };

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(LaunchConfig) == 56 && sizeof(Attribute) == 72, "as CUlaunchConfig and CUlaunchAttribute");

struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** parameters, void** extra) = nullptr;
  // The stream of PyTorch on a device; null where there is no such device: launches then get no stream.
  int (*stream)(int32_t device, void** stream) = nullptr;
  // Offset and size of a parameter of a function, an error beyond the last; null: an older driver.
  int (*parameter)(void* function, size_t index, size_t* offset, size_t* size) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*retain_context)(void** context, int device) = nullptr;
  // PyTorch's: makes a device current, until the guard is deleted.
  int (*create_guard)(int32_t device, DeviceGuardHandle* guard) = nullptr;
  int (*delete_guard)(DeviceGuardHandle guard) = nullptr;
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

Driver cuda_driver() {
  Driver found;
  void* const cuda = dlopen("libcuda.so.1", RTLD_NOW);
  find(cuda, "cuLaunchKernelEx", found.launch);
  find(cuda, "cuFuncGetParamInfo", found.parameter);
  find(cuda, "cuCtxGetCurrent", found.get_context);
  find(cuda, "cuCtxSetCurrent", found.set_context);
  find(cuda, "cuDevicePrimaryCtxRetain", found.retain_context);
  find(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream", found.stream);
  found.create_guard = &aoti_torch_create_device_guard;
  found.delete_guard = &aoti_torch_delete_device_guard;
  return found;
}

// Another driver than CUDA's, for tests and for measuring the host.
std::optional<Driver> stand_in;

const Driver& driver() {
  static const Driver cuda = cuda_driver();
  return stand_in ? *stand_in : cuda;
}

// A device that is current for a while, as launches need it.
class Current {
 public:
  Current() = default;
  ~Current() {
    if (guard_ != nullptr) driver_->delete_guard(guard_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  bool set(const Driver& d, int32_t device) {
    driver_ = &d;
    return d.create_guard != nullptr && d.create_guard(device, &guard_) == 0;
  }

 private:
  const Driver* driver_ = nullptr;
  DeviceGuardHandle guard_ = nullptr;
};

// A thread of autograd may have no context yet; kernels run in the primary one of their device.
bool ensure_context(const Driver& d, int32_t device) {
  void* context = nullptr;
  if (d.get_context == nullptr || (d.get_context(&context) == 0 && context != nullptr)) return true;
  return d.retain_context(&context, device) == 0 && d.set_context(context) == 0;
}

// PyTorch's arithmetic on one type of device. Its functions have no names in the stable ABI's headers, and
// are looked up; null: this PyTorch has no such function.
struct Library {
  int (*addmm)(AtenTensorHandle out, AtenTensorHandle base, AtenTensorHandle left, AtenTensorHandle right, double beta,
               double alpha) = nullptr;
  int (*mm)(AtenTensorHandle out, AtenTensorHandle left, AtenTensorHandle right) = nullptr;
  int (*add)(AtenTensorHandle left, AtenTensorHandle right, double alpha, AtenTensorHandle* result) = nullptr;
  int (*mul)(AtenTensorHandle left, double right, AtenTensorHandle* result) = nullptr;
};

Library library_of(const std::string& device) {
  Library found;
  void* const torch = dlopen(("libtorch_" + device + ".so").c_str(), RTLD_NOW | RTLD_NOLOAD);
  const std::string prefix = "aoti_torch_" + device;
  find(torch, (prefix + "_addmm_out").c_str(), found.addmm);
  find(torch, (prefix + "_mm_out").c_str(), found.mm);
  find(torch, (prefix + "_add_Tensor").c_str(), found.add);
  find(torch, (prefix + "_mul_Scalar").c_str(), found.mul);
  return found;
}

const Library& library(bool cpu) {
  static const Library on_cpu = library_of("cpu"), on_cuda = library_of("cuda");
  return cpu ? on_cpu : on_cuda;
}

}  // namespace
}  // namespace crate_kernels
