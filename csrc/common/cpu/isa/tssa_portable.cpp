// Token statistics attention at the level portable.
#include "../level_portable.h"
#include "../../../tssa/cpu/table.h"

namespace crate_kernels {
extern const TssaKernels tssa_portable = tssa::kKernels;
}  // namespace crate_kernels
