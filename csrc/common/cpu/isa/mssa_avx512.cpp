// Subspace attention at the level avx512.
#include "../level_avx512.h"
#if CRATE_X86_LEVELS

#include "../../../mssa/cpu/table.h"

namespace crate_kernels {
extern const MssaTables mssa_avx512 = {&kMssaKernels<Float32>, nullptr};
}  // namespace crate_kernels

#endif
