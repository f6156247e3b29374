// The CPU ops of sparse coding: all passes except PyTorch's products, cut into tasks. And the transpose of a matrix,
// for all operators' products.
#include <algorithm>
#include <optional>

#include <torch/csrc/stable/library.h>

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/tensor.h"
#include "kernels.h"

namespace crate_kernels {
namespace {

// Elements per task: enough to hide a task's start, and at most a second-level cache of one core.
constexpr int64_t kGrain = 1 << 15;

const IstaKernels& kernels() {
#if CRATE_X86_LEVELS
  const Capability level = capability();
  if (level >= Capability::avx512) return ista_avx512;
  if (level == Capability::avx2) return ista_avx2;
#endif
  return ista_portable;
}

void update(Tensor product, std::optional<Tensor> base, std::optional<Tensor> gate, double scale, double threshold,
            bool nonnegative, Tensor out) {
  const int64_t numel = out.numel();
  const IstaUpdate u = {operand(product, "product", numel),
                        operand(base, "base", numel),
                        operand(gate, "gate", numel),
                        operand(out, "out", numel),
                        static_cast<float>(scale),
                        static_cast<float>(threshold),
                        nonnegative};
  const IstaKernels& k = kernels();
  // One contiguous part per thread, cut as the products before and after cut their rows: each core reads from its own
  // cache. With the next free chunk per thread instead, the product that follows was 10-30% slower.
  torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) { k.update(u, begin, end); });
}

float* floats(const Tensor& t, const char* name, int64_t numel) {
  const Operand a = operand(t, name, numel);
  STD_TORCH_CHECK(a.dtype == Dtype::f32, name, " must be float32, got scalar type ", static_cast<int>(t.scalar_type()));
  return static_cast<float*>(a.data);
}

template <class Pass>
void for_each_band(void (*kernel)(const Pass&, int64_t), const Pass& pass, int64_t rows, int64_t columns) {
  const int64_t bands = (rows + kIstaBand - 1) / kIstaBand;
  const int64_t together = std::max<int64_t>(1, kGrain / (columns * kIstaBand + 1));
  for_each_task((bands + together - 1) / together, [&](int64_t i, Arena&) {
    for (int64_t band = i * together; band < std::min((i + 1) * together, bands); ++band) kernel(pass, band);
  });
}

void subtract_symmetric(Tensor a, Tensor b, Tensor out) {
  const int64_t dim = a.size(0);
  const IstaSquare s = {floats(a, "a", dim * dim), floats(b, "b", dim * dim), operand(out, "out", dim * dim), dim};
  for_each_band(kernels().subtract_symmetric, s, dim, dim);
}

void add_transposed(Tensor a, Tensor out) {
  const int64_t dim = a.size(0);
  const IstaSquare s = {floats(a, "a", dim * dim), nullptr, operand(out, "out", dim * dim), dim};
  for_each_band(kernels().add_transposed, s, dim, dim);
}

void transpose(Tensor a, Tensor out) {
  const int64_t rows = a.size(0), columns = a.size(1);
  const IstaTranspose t = {floats(a, "a", rows * columns), floats(out, "out", rows * columns), rows, columns};
  for_each_band(kernels().transpose, t, rows, columns);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "ista_update(Tensor product, Tensor? base, Tensor? gate, float scale, float threshold, bool nonnegative, "
      "Tensor(a!) out) -> ()");
  m.def("ista_subtract_symmetric(Tensor a, Tensor b, Tensor(a!) out) -> ()");
  m.def("ista_add_transposed(Tensor a, Tensor(a!) out) -> ()");
  m.def("transpose(Tensor a, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, m) {
  m.impl("ista_update", TORCH_BOX(&update));
  m.impl("ista_subtract_symmetric", TORCH_BOX(&subtract_symmetric));
  m.impl("ista_add_transposed", TORCH_BOX(&add_transposed));
  m.impl("transpose", TORCH_BOX(&transpose));
}

}  // namespace crate_kernels
