// The CUDA ops of sparse coding: all passes except PyTorch's products.
#include <optional>

#include "../../common/box.h"
#include "../../common/cuda/launch.cuh"
#include "update.cuh"

namespace crate_kernels {
namespace {

void update(std::optional<Tensor> product, std::optional<Tensor> base, std::optional<Tensor> gate, double scale,
            double threshold, bool nonnegative, Tensor out, std::optional<Tensor> gated) {
  const Given given("ista", device_type(), "out", out);
  IstaUpdate u = {};
  u.numel = out.numel();
  u.product = given.elements("product", product, u.numel);
  u.base = given.elements("base", base, u.numel);
  u.gated = given.elements("gated", gated, u.numel);
  u.gate = given.elements("gate", gate, u.numel);
  u.out = given.elements("out", out, u.numel);
  u.scale = static_cast<float>(scale);
  u.threshold = static_cast<float>(threshold);
  u.gate_all = gate.has_value() && !gated.has_value();
  u.nonnegative = nonnegative;
  STD_TORCH_CHECK(gate.has_value() || !gated.has_value(), "gate must be given where something is gated");
  u.wide = true;
  for (const Operand& o : {u.product, u.base, u.gated, u.gate, u.out}) {
    u.wide = u.wide && reinterpret_cast<uintptr_t>(o.data) % 16 == 0;
  }
  const int32_t device = out.get_device_index();
  const OnDevice on(device);
  constexpr int64_t kItems = kIstaThreads * kIstaItems;
  launch<ista_update_kernel>({(u.numel + kItems - 1) / kItems, kIstaThreads, 0, 1, current_stream(device)}, u);
}

void symmetrize(Tensor a, Tensor both) {
  const Given given("ista", device_type(), "a", a);
  given.rank("a", a, 2);
  const int64_t dim = a.size(0), tiles = (dim + kIstaTile - 1) / kIstaTile;
  given.contiguous("a", a, a.scalar_type(), {dim, dim});
  given.contiguous("both", both, a.scalar_type(), {dim, dim});
  const Operand from = given.elements("a", a, dim * dim), to = given.elements("both", both, dim * dim);
  const int32_t device = a.get_device_index();
  const OnDevice on(device);
  const Launch where = {tiles * tiles, kIstaTile * kIstaTileRows,
                        static_cast<int64_t>(kIstaTile * (kIstaTile + 1) * sizeof(float)), 1, current_stream(device)};
  with_dtype(to.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch<ista_symmetrize_kernel<T>>(where, static_cast<const T*>(from.data), static_cast<T*>(to.data), dim);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "cuda_ista_update(Tensor? product, Tensor? base, Tensor? gate, float scale, float threshold, bool nonnegative, "
      "Tensor(a!) out, Tensor? gated=None) -> ()");
  m.def("cuda_ista_symmetrize(Tensor a, Tensor(a!) both) -> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl("cuda_ista_update", TORCH_BOX(&update));
  m.impl("cuda_ista_symmetrize", TORCH_BOX(&symmetrize));
}

}  // namespace crate_kernels
