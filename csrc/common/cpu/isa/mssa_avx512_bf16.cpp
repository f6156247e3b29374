// Subspace attention by bf16 dot products at the level avx512_bf16.
#include "../level_avx512_bf16.h"
#if CRATE_X86_LEVELS

#include "../../../mssa/cpu/table.h"

namespace crate_kernels {
extern const MssaTables mssa_avx512_bf16 = {nullptr, &kMssaKernels<BFloat16>};
}  // namespace crate_kernels

#endif
