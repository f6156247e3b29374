// Subspace attention at the level avx2.
#include "../level_avx2.h"
#if CRATE_X86_LEVELS

#include "../../../mssa/cpu/table.h"

namespace crate_kernels {
extern const MssaTables mssa_avx2 = {&kMssaKernels<Float32>, nullptr};
}  // namespace crate_kernels

#endif
