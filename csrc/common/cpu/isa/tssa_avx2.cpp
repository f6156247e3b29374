// Token statistics attention at the level avx2.
#include "../level_avx2.h"
#if CRATE_X86_LEVELS

#include "../../../tssa/cpu/table.h"

namespace crate_kernels {
extern const TssaKernels tssa_avx2 = tssa::kKernels;
}  // namespace crate_kernels

#endif
