// The extension's operators about itself. It has no Python module, only operators: so it needs neither pybind11 nor
// Python's headers, and one file serves every Python version.
#include <string>

#include <torch/csrc/stable/library.h>

#include "common/cpu/capability.h"

#define CRATE_STRING(x) #x
#define CRATE_QUOTED(x) CRATE_STRING(x)

namespace crate_kernels {
namespace {

// libraries.py finds this text in the file, and so knows a binary's sources without loading it.
const char kSources[] = "crate_kernels sources " CRATE_QUOTED(CRATE_SOURCES);

// Returns lines of "key value".
std::string build_info() {
  std::string info = std::string("sources ") + (kSources + sizeof("crate_kernels sources ") - 1);
  info += "\ncompiler " __VERSION__ "\nstandard " + std::to_string(__cplusplus);
  info += "\ntorch_abi " CRATE_QUOTED(TORCH_TARGET_VERSION) "\ncpu_capabilities";
  for (const std::string& name : compiled_capabilities()) info += " " + name;
  return info;
}

std::string cpu_capability() {
  return capability_name(capability());
}

void set_cpu_capability(std::string level) {
  set_capability(level);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cpu_build_info() -> str");
  m.def("cpu_capability() -> str");
  m.def("set_cpu_capability(str level) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cpu_build_info", TORCH_BOX(&build_info));
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("set_cpu_capability", TORCH_BOX(&set_cpu_capability));
}

}  // namespace crate_kernels
