// Token statistics attention at the level avx512_bf16.
#include "../level_avx512_bf16.h"
#if CRATE_X86_LEVELS

#include "../../../tssa/cpu/table.h"

namespace crate_kernels {
extern const TssaKernels tssa_avx512_bf16 = tssa::kKernels;
}  // namespace crate_kernels

#endif
