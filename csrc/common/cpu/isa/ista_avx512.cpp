// Sparse coding at the level avx512.
#include "../level_avx512.h"
#if CRATE_X86_LEVELS

#include "../../../ista/cpu/few.h"
#include "../../../ista/cpu/square.h"

namespace crate_kernels {
extern const IstaKernels ista_avx512 = {ista::update,    ista::subtract_symmetric, ista::add_transposed,
                                        ista::transpose, ista::few_dots,           ista::few};
}  // namespace crate_kernels

#endif
