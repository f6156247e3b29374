// Every kernel at the level portable.
#include "../level_portable.h"
#include "../../../ista/cpu/square.h"
#include "../../../mssa/cpu/backward.h"
#include "../../../mssa/cpu/decode.h"
#include "../../../mssa/cpu/forward.h"
#include "../../../tssa/cpu/table.h"

namespace crate_kernels {
namespace {
const MssaKernels mssa_f32 = {mssa_forward<Float32>, mssa_backward<Float32>, mssa_combine, mssa_decode,
                              mssa_decode_combine};
}
extern const MssaTables mssa_portable = {&mssa_f32, nullptr};
extern const IstaKernels ista_portable = {ista::update, ista::subtract_symmetric, ista::add_transposed};
extern const TssaKernels tssa_portable = tssa::kKernels;
}  // namespace crate_kernels
