// Subspace attention at the level portable.
#include "../level_portable.h"
#include "../../../mssa/cpu/table.h"

namespace crate_kernels {
extern const MssaTables mssa_portable = {&kMssaKernels<Float32>, nullptr};
}  // namespace crate_kernels
