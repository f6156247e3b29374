// Sparse coding in programs without Python: common/cpu/exported.h. The products are PyTorch's, as those of
// crate_kernels/ops/ista/native.py.
#include "../../common/cpu/exported.h"
#include "kernels.h"

namespace crate_kernels {
namespace {

using Optional = std::optional<Tensor>;

// Up to so many rows of at most so many channels, all products are one call, in float32.
constexpr int64_t kFewRows = 64, kFewDim = 1024;

Tensor rows_of(const Tensor& x) {
  return torch::stable::contiguous(torch::stable::reshape(x, {-1, x.size(x.dim() - 1)}));
}

Tensor transposed(const Tensor& matrix) {
  return torch::stable::transpose(matrix, 0, 1);
}

// left @ right, as contiguous rows.
Tensor multiply(const Tensor& left, const Tensor& right) {
  return torch::stable::contiguous(dispatch<Tensor>("aten::mm", left, right));
}

// shrink(base + scale * product), of `dtype`.
Tensor update(const Tensor& product, const Optional& base, double scale, double threshold, bool nonnegative,
              ScalarType dtype) {
  const Tensor out = torch::stable::new_empty(product, product.sizes(), dtype);
  run_kernel("ista_update", product, base, Optional(), scale, threshold, nonnegative, out);
  return out;
}

// base - left @ right, of base's dtype.
Tensor subtract_product(const Tensor& base, const Tensor& left, const Tensor& right) {
  return update(multiply(left, right), base, -1.0, 0.0, false, base.scalar_type());
}

Tensor forward(Tensor x, Tensor weight, double step_size, double lambd, bool nonnegative, ScalarType compute,
               std::string backend) {
  check_backend("ista", backend);
  const Tensor rows = rows_of(x);
  const int64_t count = rows.size(0), dim = rows.size(1);
  const double threshold = step_size * lambd;
  if (rows.scalar_type() == ScalarType::Float && weight.scalar_type() == ScalarType::Float &&
      compute == ScalarType::Float && dim % kIstaBand == 0 && 0 < dim && dim <= kFewDim && 0 < count &&
      count <= kFewRows) {
    const Tensor out = torch::stable::empty_like(rows);
    dispatch<void>("crate_kernels_C::ista_few_fwd", rows, torch::stable::contiguous(weight), step_size, threshold,
                   nonnegative, out);
    return torch::stable::view(out, x.sizes());
  }
  const Tensor matrix = torch::stable::contiguous(cast(weight, ScalarType::Float));
  Optional product;
  if (count >= dim) {  // one product of the tokens, with K = W - W^T W
    product = multiply(cast(rows, compute), cast(subtract_product(matrix, transposed(matrix), matrix), compute));
  } else {
    const Tensor tokens = cast(rows, ScalarType::Float);
    product = multiply(subtract_product(tokens, tokens, transposed(matrix)), matrix);
  }
  return torch::stable::view(update(*product, rows, step_size, threshold, nonnegative, rows.scalar_type()), x.sizes());
}

std::tuple<Tensor, Tensor, Tensor> forward_overcomplete(Tensor x, Tensor weight, Optional decoder, bool keep,
                                                        double step_size, double lambd, int64_t steps,
                                                        std::string backend) {
  check_backend("ista_overcomplete", backend);
  const ScalarType dtype = x.scalar_type();
  const Tensor tokens = rows_of(x), matrix = cast(weight, dtype);
  const int64_t count = tokens.size(0), kept = keep ? steps : 0;
  Tensor codes = torch::stable::new_empty(x, {kept, count, weight.size(1)});
  Tensor residuals = torch::stable::new_empty(x, {std::max<int64_t>(kept - 1, 0), count, tokens.size(1)});
  Optional code;
  for (int64_t step = 0; step < steps; ++step) {
    const Tensor residual = code.has_value() ? subtract_product(tokens, *code, transposed(matrix)) : tokens;
    code = update(multiply(residual, matrix), code, step_size, step_size * lambd, true, dtype);
    if (!keep) continue;
    Tensor its_code = torch::stable::select(codes, 0, step);
    torch::stable::copy_(its_code, *code);
    if (step == 0) continue;
    Tensor its_residual = torch::stable::select(residuals, 0, step - 1);
    torch::stable::copy_(its_residual, residual);
  }
  const Tensor out = multiply(*code, transposed(decoder.has_value() ? cast(*decoder, dtype) : matrix));
  if (!keep) codes = residuals = torch::stable::new_empty(x, {0});
  return {torch::stable::view(out, x.sizes()), codes, residuals};
}

const int kForward = add_exported(
    {"ista_fwd(Tensor x, Tensor weight, float step_size, float lambd, bool nonnegative, ScalarType compute, "
     "str backend) -> Tensor",
     CRATE_BOX(&forward)});
const int kOvercomplete = add_exported(
    {"ista_overcomplete_fwd(Tensor x, Tensor weight, Tensor? decoder, bool keep, float step_size, float lambd, "
     "SymInt steps, str backend) -> (Tensor, Tensor, Tensor)",
     CRATE_BOX(&forward_overcomplete)});

}  // namespace
}  // namespace crate_kernels
