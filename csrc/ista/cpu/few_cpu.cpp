// The CPU ops of sparse coding of a few tokens: two products per step, each pass cut into rows or columns.
#include <algorithm>
#include <memory>
#include <optional>

#include "../../common/box.h"
#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/op_checks.h"
#include "kernels.h"

namespace crate_kernels {
namespace {

constexpr int64_t kColumns = 64;              // of a task
constexpr int64_t kWorth = int64_t{1} << 18;  // multiplications that are worth a thread

const IstaKernels& kernels() {
#if CRATE_X86_LEVELS
  const Capability level = capability();
  if (level >= Capability::avx512) return ista_avx512;
  if (level == Capability::avx2) return ista_avx2;
#endif
  return ista_portable;
}

// A call's tensors: rows of tokens and a square, contiguous and float32.
struct Few {
  const OpChecks checks;
  int64_t tokens, dim;

  Few(const char* call, const Tensor& x, const Tensor& weight) : checks(call, "x", x), tokens(0), dim(0) {
    checks.rank("x", x, 2);
    tokens = x.size(0);
    dim = x.size(1);
    STD_TORCH_CHECK(dim > 0 && dim % kIstaBand == 0, call, ": dim must be a multiple of ", kIstaBand, ", got ", dim);
    checks.numbers("weight", weight, {dim, dim});
  }

  float* rows(const Tensor& t, const char* name) const {
    checks.numbers(name, t, {tokens, dim});
    return static_cast<float*>(t.data_ptr());
  }
  float* square(const Tensor& t, const char* name) const {
    checks.numbers(name, t, {dim, dim});
    return static_cast<float*>(t.data_ptr());
  }
  std::unique_ptr<float[]> scratch() const { return std::unique_ptr<float[]>(new float[tokens * dim]); }

  // Calls task(first, last) for parts of [0, dim), by as many threads as a product of the tokens is worth.
  template <class Task>
  void share(int64_t width, const Task& task) const {
    const int64_t maximum = std::max<int64_t>(1, tokens * dim * dim / kWorth);
    for_each_task((dim + width - 1) / width,
                  [&](int64_t i, Arena&) { task(i * width, std::min(dim, (i + 1) * width)); }, maximum);
  }
  void dots(const float* x, const float* weight, const float* base, float* out) const {
    const IstaFewDots d = {x, weight, base, out, tokens, dim};
    share(kIstaBand, [&](int64_t first, int64_t last) { kernels().few_dots(d, first, last); });
  }
  void columns(const IstaFew& f) const {
    share(kColumns, [&](int64_t first, int64_t last) { kernels().few(f, 0, tokens, first, last); });
  }
};

void forward(Tensor x, Tensor weight, double step_size, double threshold, bool nonnegative, Tensor out) {
  const Few few("ista", x, weight);
  const float *const tokens = few.rows(x, "x"), *const matrix = few.square(weight, "weight");
  IstaFew f = {};
  f.out = few.rows(out, "out");
  const auto residual = few.scratch();
  few.dots(tokens, matrix, tokens, residual.get());
  f.added = {residual.get(), few.dim, 1, matrix, few.dim};
  f.base = tokens;
  f.dim = few.dim;
  f.scale = static_cast<float>(step_size);
  f.threshold = static_cast<float>(threshold);
  f.nonnegative = nonnegative;
  few.columns(f);
}

void backward(Tensor dy, Tensor x, Tensor weight, Tensor y, double step_size, std::optional<Tensor> dx,
              std::optional<Tensor> dweight) {
  const Few few("ista backward", x, weight);
  const float *const tokens = few.rows(x, "x"), *const matrix = few.square(weight, "weight");
  const float *const upstream = few.rows(dy, "dy"), *const result = few.rows(y, "y");
  float* const dx_rows = dx.has_value() ? few.rows(*dx, "dx") : nullptr;
  float* const dweight_rows = dweight.has_value() ? few.square(*dweight, "dweight") : nullptr;
  const auto masked = few.scratch(), dr = few.scratch();
  for (int64_t n = 0; n < few.tokens * few.dim; ++n) masked[n] = result[n] != 0.0f ? upstream[n] : 0.0f;
  few.dots(masked.get(), matrix, nullptr, dr.get());  // the gradient of the residual, before the step size
  IstaFew f = {};
  f.dim = few.dim;
  f.scale = static_cast<float>(step_size);
  if (dx_rows != nullptr) {
    f.subtracted = {dr.get(), few.dim, 1, matrix, few.dim};
    f.base = masked.get();
    f.plus = dr.get();
    f.out = dx_rows;
    few.columns(f);
  }
  if (dweight_rows == nullptr) return;
  const auto residual = few.scratch();
  few.dots(tokens, matrix, tokens, residual.get());
  f.added = {residual.get(), 1, few.dim, masked.get(), few.tokens};
  f.subtracted = {dr.get(), 1, few.dim, tokens, few.tokens};
  f.base = f.plus = nullptr;
  f.out = dweight_rows;
  few.share(kIstaBand, [&](int64_t first, int64_t last) { kernels().few(f, first, last, 0, few.dim); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "ista_few_fwd(Tensor x, Tensor weight, float step_size, float threshold, bool nonnegative, Tensor(a!) out) -> "
      "()");
  m.def(
      "ista_few_bwd(Tensor dy, Tensor x, Tensor weight, Tensor y, float step_size, Tensor(a!)? dx, Tensor(b!)? "
      "dweight) "
      "-> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl("ista_few_fwd", TORCH_BOX(&forward));
  m.impl("ista_few_bwd", TORCH_BOX(&backward));
}

}  // namespace crate_kernels
