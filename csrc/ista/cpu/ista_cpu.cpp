// The CPU ops of sparse coding: all passes except PyTorch's products, cut into tasks. And the transpose of a matrix,
// for all operators' products.
#include <algorithm>
#include <optional>

#include "../../common/box.h"
#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/op_checks.h"
#include "../../common/plan.h"
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
  const OpChecks checks("ista", "out", out);
  const int64_t numel = out.numel();
  const IstaCpuUpdate u = {checks.elements("product", product, numel),
                           checks.elements("base", base, numel),
                           checks.elements("gate", gate, numel),
                           checks.elements("out", out, numel),
                           static_cast<float>(scale),
                           static_cast<float>(threshold),
                           nonnegative};
  const IstaKernels& k = kernels();
  // One contiguous part per thread, cut as the products before and after cut their rows: each core reads from its own
  // cache. With the next free chunk per thread instead, the product that follows was 10-30% slower.
  torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) { k.update(u, begin, end); });
}

float* floats(const Tensor& t) {
  return static_cast<float*>(t.data_ptr());
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
  const OpChecks checks("ista", "a", a);
  checks.rank("a", a, 2);
  const int64_t dim = a.size(0);
  checks.numbers("a", a, {dim, dim});
  checks.numbers("b", b, {dim, dim});
  const IstaSquare s = {floats(a), floats(b), checks.elements("out", out, dim * dim), dim};
  for_each_band(kernels().subtract_symmetric, s, dim, dim);
}

void add_transposed(Tensor a, Tensor out) {
  const OpChecks checks("ista", "a", a);
  checks.rank("a", a, 2);
  const int64_t dim = a.size(0);
  checks.numbers("a", a, {dim, dim});
  const IstaSquare s = {floats(a), nullptr, checks.elements("out", out, dim * dim), dim};
  for_each_band(kernels().add_transposed, s, dim, dim);
}

void transpose(Tensor a, Tensor out) {
  const OpChecks checks("transpose", "a", a);
  checks.rank("a", a, 2);
  const int64_t rows = a.size(0), columns = a.size(1);
  checks.numbers("a", a, {rows, columns});
  checks.numbers("out", out, {columns, rows});
  for_each_band(kernels().transpose, IstaTranspose{floats(a), floats(out), rows, columns}, rows, columns);
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

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("ista_update", &update));
  m.impl(CRATE_KERNEL("ista_subtract_symmetric", &subtract_symmetric));
  m.impl(CRATE_KERNEL("ista_add_transposed", &add_transposed));
  m.impl(CRATE_KERNEL("transpose", &transpose));
}

}  // namespace crate_kernels
