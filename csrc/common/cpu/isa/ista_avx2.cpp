// Sparse coding at the level avx2.
#include "../level_avx2.h"
#if CRATE_X86_LEVELS

#include "../../../ista/cpu/few.h"
#include "../../../ista/cpu/square.h"

namespace crate_kernels {
extern const IstaKernels ista_avx2 = {ista::update,    ista::subtract_symmetric, ista::add_transposed,
                                      ista::transpose, ista::few_dots,           ista::few};
}  // namespace crate_kernels

#endif
