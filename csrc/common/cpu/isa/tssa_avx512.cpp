// Token statistics attention at the level avx512.
#include "../level_avx512.h"
#if CRATE_X86_LEVELS

#include "../../../tssa/cpu/table.h"

namespace crate_kernels {
extern const TssaKernels tssa_avx512 = tssa::kKernels;
}  // namespace crate_kernels

#endif
