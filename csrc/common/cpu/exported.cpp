#include "exported.h"

#include <memory>
#include <vector>

namespace crate_kernels {
namespace {

std::vector<ExportedOp>& exported() {
  static std::vector<ExportedOp> ops;
  return ops;
}

// A linear layer, which is PyTorch's own here.
Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  return dispatch<Tensor>("aten::linear", x, weight, bias);
}

const int kLinear = add_exported({"linear_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor", CRATE_BOX(&linear)});

}  // namespace

int add_exported(ExportedOp op) {
  exported().push_back(op);
  return static_cast<int>(exported().size()) - 1;
}

}  // namespace crate_kernels

// Defines the ops crate_kernels::* for CPU tensors. A process that imports the Python package has them already.
extern "C" __attribute__((visibility("default"))) void crate_kernels_define_operators() {
  using torch::stable::detail::StableLibrary;
  static const auto defined = [] {
    auto schemas = std::make_unique<StableLibrary>(StableLibrary::Kind::FRAGMENT, "crate_kernels", nullptr, __FILE__,
                                                   static_cast<uint32_t>(__LINE__));
    auto kernels = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "crate_kernels", "CPU", __FILE__,
                                                   static_cast<uint32_t>(__LINE__));
    for (const crate_kernels::ExportedOp& op : crate_kernels::exported()) {
      schemas->def(op.schema);
      kernels->impl(std::string(op.schema, std::string(op.schema).find('(')).c_str(), op.kernel);
    }
    return std::make_pair(std::move(schemas), std::move(kernels));
  }();
  static_cast<void>(defined);
}
