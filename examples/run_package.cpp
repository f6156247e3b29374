// Runs a model that torch._inductor.aoti_compile_and_package compiled, in a program without Python (docs/export.md):
//
//   run_package EXTENSION PACKAGE.pt2 INPUT.pt OUTPUT.pt
//
// EXTENSION is the path that `python -m crate_kernels info` prints. INPUT.pt and OUTPUT.pt are tensors as torch.save
// writes them. With TORCH the folder of `python -c "import torch; print(torch.__path__[0])"`, it is compiled by
//
//   c++ -std=c++20 run_package.cpp -o run_package -isystem$TORCH/include -L$TORCH/lib -ltorch -ltorch_cpu -lc10 -ldl
//     -Wl,-rpath,$TORCH/lib
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace {

// Defines the operators of crate_kernels in this process.
bool define_operators(const char* extension) {
  void* const library = dlopen(extension, RTLD_NOW);
  void* const define = library == nullptr ? nullptr : dlsym(library, "crate_kernels_define_operators");
  if (define == nullptr) {
    std::cerr << "run_package: " << dlerror() << "\n";
    return false;
  }
  reinterpret_cast<void (*)()>(define)();
  return true;
}

at::Tensor read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), {}}).toTensor();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::cerr << "run_package: takes EXTENSION PACKAGE.pt2 INPUT.pt OUTPUT.pt\n";
    return 2;
  }
  if (!define_operators(arguments[1])) return 1;
  const c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  const at::Tensor output = model.run({read(arguments[3])}).at(0);
  const std::vector<char> bytes = torch::jit::pickle_save(output);
  std::ofstream(arguments[4], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return 0;
}
