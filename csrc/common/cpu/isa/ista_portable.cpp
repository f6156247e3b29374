// Sparse coding at the level portable.
#include "../level_portable.h"
#include "../../../ista/cpu/few.h"
#include "../../../ista/cpu/square.h"

namespace crate_kernels {
extern const IstaKernels ista_portable = {ista::update,    ista::subtract_symmetric, ista::add_transposed,
                                          ista::transpose, ista::few_dots,           ista::few};
}  // namespace crate_kernels
