// The Python module _C: what is not a tensor operator. Importing it also registers the operators
// torch.ops.crate_kernels_C.*, which csrc/<op>/<op>_cpu.cpp define.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/stable/library.h>

#include "common/capability.h"

#define CRATE_STRING(x) #x
#define CRATE_QUOTED(x) CRATE_STRING(x)

namespace {

// Found in the file by _build.py: whether a binary is of these sources is known without loading it.
const char kSources[] = "crate_kernels sources " CRATE_QUOTED(CRATE_SOURCES);

pybind11::dict build_info() {
  pybind11::dict info;
  info["sources"] = std::string(kSources).substr(sizeof("crate_kernels sources ") - 1);
  info["compiler"] = __VERSION__;
  info["standard"] = static_cast<long>(__cplusplus);
  info["torch_abi"] = CRATE_QUOTED(TORCH_TARGET_VERSION);
  info["cpu_capabilities"] = crate_kernels::compiled_capabilities();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What crate_kernels was compiled with, and for which processors.";
  m.def("build_info", &build_info, "Say how the extension was compiled.");
  m.def(
      "cpu_capability", [] { return crate_kernels::capability_name(crate_kernels::capability()); },
      "Name the instruction-set level that the CPU kernels use.");
  m.def("set_cpu_capability", &crate_kernels::set_capability, pybind11::arg("level"),
        "Use another level, of those that this machine has. For tests.");
}
