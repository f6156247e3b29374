// The CUDA library's operators about itself. It has no Python module, only operators.
#include <string>

#include "common/cuda/launch.cuh"

#define CRATE_STRING(x) #x
#define CRATE_QUOTED(x) CRATE_STRING(x)

namespace crate_kernels {
namespace {

// libraries.py finds this text in the file, and so knows a binary's sources without loading it.
const char kSources[] = "crate_kernels sources " CRATE_QUOTED(CRATE_SOURCES);

// Returns lines of "key value".
std::string build_info() {
  std::string info = std::string("sources ") + (kSources + sizeof("crate_kernels sources ") - 1);
#ifdef __CUDACC__
  info += "\ncompiler nvcc " CRATE_QUOTED(__CUDACC_VER_MAJOR__) "." CRATE_QUOTED(__CUDACC_VER_MINOR__);
#else
  info += "\ncompiler emulated, " __VERSION__;
#endif
  return info + "\narchs " CRATE_QUOTED(CRATE_ARCHS) "\ntorch_abi " CRATE_QUOTED(TORCH_TARGET_VERSION);
}

std::string kernel_names() {
  std::string names;
  for (const KernelEntry& entry : kernel_entries()) names += entry.name + "\n";
  return names;
}

// Returns lines of "key value" for a kernel launched with `threads` threads per block and this much dynamic shared
// memory.
std::string kernel_attributes(std::string name, int64_t threads, int64_t shared_bytes) {
  for (const KernelEntry& entry : kernel_entries()) {
    if (entry.name != name) continue;
    cudaFuncAttributes a = {};
    CRATE_CUDA_CHECK(cudaFuncGetAttributes(&a, entry.function));
    if (shared_bytes > 48 * 1024) {
      CRATE_CUDA_CHECK(cudaFuncSetAttribute(entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)));
    }
    int blocks = 0;
    CRATE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, entry.function, static_cast<int>(threads),
                                                                   static_cast<size_t>(shared_bytes)));
    return "registers " + std::to_string(a.numRegs) + "\nstatic_shared_bytes " + std::to_string(a.sharedSizeBytes) +
           "\nlocal_bytes " + std::to_string(a.localSizeBytes) + "\nmax_threads " +
           std::to_string(a.maxThreadsPerBlock) + "\nptx " + std::to_string(a.ptxVersion) + "\nbinary " +
           std::to_string(a.binaryVersion) + "\nblocks_per_multiprocessor " + std::to_string(blocks);
  }
  STD_TORCH_CHECK(false, "kernel must be one of those that kernel_names lists, got ", name);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cuda_build_info() -> str");
  m.def("cuda_kernel_names() -> str");
  m.def("cuda_kernel_attributes(str name, int threads, int shared_bytes) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_build_info", TORCH_BOX(&build_info));
  m.impl("cuda_kernel_names", TORCH_BOX(&kernel_names));
  m.impl("cuda_kernel_attributes", TORCH_BOX(&kernel_attributes));
}

}  // namespace crate_kernels
