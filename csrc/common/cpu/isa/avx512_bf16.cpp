// The kernels that use bf16 dot products: additions to the level avx512.
#include "../level_avx512_bf16.h"
#if CRATE_X86_LEVELS

#include "../../../mssa/cpu/backward.h"
#include "../../../mssa/cpu/decode.h"
#include "../../../mssa/cpu/forward.h"

namespace crate_kernels {
namespace {
const MssaKernels mssa_bf16 = {mssa_forward<BFloat16>, mssa_backward<BFloat16>, mssa_combine, mssa_decode,
                               mssa_decode_combine};
}
extern const MssaTables mssa_avx512_bf16 = {nullptr, &mssa_bf16};
}  // namespace crate_kernels

#endif
