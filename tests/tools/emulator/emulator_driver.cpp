// The functions of the CUDA driver that launches by crate_kernels/_cuda and by plans call, for the device that a test
// sets. A kernel's handle is its Entry.
#include <exception>
#include <map>
#include <string>

#include <torch/csrc/stable/library.h>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulator {

constexpr int kLargestCluster = 16;  // more than 8 are not portable

Device& device() {
  static Device it;
  return it;
}

namespace {

std::map<const void*, int64_t>& allowed_bytes() {
  static std::map<const void*, int64_t> it;
  return it;
}

}  // namespace

Error allow(const void* kernel, int64_t shared_bytes) {
  if (shared_bytes > device().shared_limit) return kInvalidValue;
  allowed_bytes()[kernel] = shared_bytes;
  return kSuccess;
}

Error check(const Launch& launch, const void* kernel) {
  const auto allowed = allowed_bytes().find(kernel);
  const int64_t limit =
      allowed == allowed_bytes().end() ? kUnasked : std::min<int64_t>(allowed->second, device().shared_limit);
  if (launch.threads <= 0 || launch.threads > 1024 || launch.threads % 32 != 0) return kInvalidConfiguration;
  if (launch.cluster > 1 && device().capability < 90) return kInvalidConfiguration;
  if (launch.cluster <= 0 || launch.cluster > kLargestCluster || launch.grid % launch.cluster != 0)
    return kInvalidConfiguration;
  if (launch.cooperative && launch.grid > device().multiprocessors) return kTooLarge;
  return launch.shared_bytes > limit ? kInvalidValue : kSuccess;
}

namespace {

std::string launched;  // names of the kernels launched since a test last asked, one per line
std::string failure;

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
constexpr int kCooperative = 2, kClusterSize = 4, kFailed = 999;

Launch launch_of(const DriverConfig& config) {
  Launch found = {config.grid[0], static_cast<int>(config.block[0]), config.shared_bytes};
  for (unsigned n = 0; n < config.count; ++n) {
    if (config.attributes[n].id == kCooperative) found.cooperative = config.attributes[n].value[0] != 0;
    if (config.attributes[n].id == kClusterSize) found.cluster = static_cast<int>(config.attributes[n].value[0]);
  }
  return found;
}

void set_device(int64_t capability, int64_t multiprocessors, int64_t shared_limit, bool descending, bool early,
                bool traced) {
  device() = {static_cast<int>(capability),
              static_cast<int>(multiprocessors),
              static_cast<int>(shared_limit),
              descending,
              early,
              traced};
}

// Returns the previous capability.
int64_t set_capability(int64_t capability) {
  const int before = device().capability;
  device().capability = static_cast<int>(capability);
  return before;
}

std::string launches() {
  std::string names;
  std::swap(names, launched);
  return names;
}

}  // namespace
}  // namespace emulator

// Returns an error of CUDA, or kFailed where a kernel failed.
EMULATED_API int emulated_launch(const emulator::DriverConfig* config, const emulator::Entry* kernel, void** parameters,
                                 void**) {
  const emulator::Launch launch = emulator::launch_of(*config);
  const emulator::Error error = emulator::check(launch, kernel);
  if (error != emulator::kSuccess) return error;
  emulator::launched += kernel->name + "\n";
  try {
    emulator::run(launch, [&] { kernel->call(parameters); });
  } catch (const std::exception& failed) {
    emulator::failure = failed.what();
    return emulator::kFailed;
  }
  return emulator::kSuccess;
}

EMULATED_API int emulated_parameter(const emulator::Entry* kernel, size_t index, size_t* offset, size_t* size) {
  if (index >= kernel->sizes.size()) return emulator::kInvalidValue;
  *offset = 0;
  *size = kernel->sizes[index];
  return emulator::kSuccess;
}

EMULATED_API int emulated_allow(const emulator::Entry* kernel, int shared_bytes) {
  return emulator::allow(kernel, shared_bytes);
}

EMULATED_API int emulated_clusters(const emulator::Entry* kernel, const emulator::DriverConfig* config) {
  emulator::Launch launch = emulator::launch_of(*config);
  launch.cooperative = false;  // it asks how many there may be
  if (emulator::check(launch, kernel) != emulator::kSuccess) return 0;
  return emulator::device().multiprocessors / launch.cluster;
}

EMULATED_API const char* emulated_failure() {
  return emulator::failure.c_str();
}

EMULATED_API int emulated_fact(int which) {
  const emulator::Device& device = emulator::device();
  const int facts[] = {device.capability, device.multiprocessors, device.shared_limit};
  return facts[which];
}

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "emulated_device(int capability, int multiprocessors, int shared_limit, bool descending, bool early, "
      "bool traced) -> ()");
  m.def("emulated_capability(int capability) -> int");
  m.def("emulated_launches() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("emulated_device", TORCH_BOX(&emulator::set_device));
  m.impl("emulated_capability", TORCH_BOX(&emulator::set_capability));
  m.impl("emulated_launches", TORCH_BOX(&emulator::launches));
}
