// Subspace attention by matrices of bf16 at the level amx.
#include "../level_amx.h"
#if CRATE_X86_LEVELS

#include "../../../mssa/cpu/table.h"

namespace crate_kernels {
extern const MssaTables mssa_amx = {nullptr, &kMssaKernels<BFloat16Tiles>};
}  // namespace crate_kernels

#endif
