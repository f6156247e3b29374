// The CUDA ops of token statistics. One file for both forms: half of the time it takes to compile is PyTorch's headers.
#include "../../common/box.h"
#include "causal_launch.cuh"
#include "full_launch.cuh"

namespace crate_kernels {

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cuda_tssa_chunks(Tensor w, Tensor? dout, Tensor? cu_seqlens, int max_seqlen) -> int");
  m.def("cuda_tssa_fwd(" CRATE_TSSA_FWD ", Tensor(e!)? sums_1, Tensor(f!)? sums_2) -> ()");
  m.def("cuda_tssa_bwd(" CRATE_TSSA_BWD ", Tensor(c!)? dlogit, Tensor(d!)? sums_1, Tensor(e!)? sums_2) -> ()");
  m.def("cuda_tssa_causal_chunks(Tensor w, Tensor? dout, Tensor? cu_seqlens, int max_seqlen) -> int");
  m.def("cuda_tssa_causal_fwd(" CRATE_TSSA_CAUSAL_FWD ", Tensor(c!)? sums_1, Tensor(d!)? sums_2) -> ()");
  m.def("cuda_tssa_causal_bwd(" CRATE_TSSA_CAUSAL_BWD
        ", Tensor(d!) dlogit, Tensor(e!)? totals, Tensor(f!)? dmoments, Tensor(g!)? denergies) -> ()");
  m.def("cuda_tssa_decode(" CRATE_TSSA_DECODE ", Tensor(g!)? sums_1, Tensor(h!)? sums_2) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CRATE_DEVICE_KEY, m) {
  m.impl("cuda_tssa_chunks", CRATE_BOX(&tssa_full::chunks));
  m.impl("cuda_tssa_fwd", CRATE_BOX(&tssa_full::forward));
  m.impl("cuda_tssa_bwd", CRATE_BOX(&tssa_full::backward));
  m.impl("cuda_tssa_causal_chunks", CRATE_BOX(&tssa_causal::chunks));
  m.impl("cuda_tssa_causal_fwd", CRATE_BOX(&tssa_causal::forward));
  m.impl("cuda_tssa_causal_bwd", CRATE_BOX(&tssa_causal::backward));
  m.impl("cuda_tssa_decode", CRATE_BOX(&tssa_causal::decode));
}

}  // namespace crate_kernels
