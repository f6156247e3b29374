// The CUDA ops of token statistics. One file for both forms: half of the time it takes to compile is PyTorch's headers.
#include "causal_launch.cuh"
#include "full_launch.cuh"

namespace crate_kernels {

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("cuda_tssa_chunks(Tensor w, Tensor? dout, Tensor? cu_seqlens, int max_seqlen) -> int");
  m.def(
      "cuda_tssa_fwd(Tensor w, Tensor temp, Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, "
      "Tensor? seed, float dropout_p, Tensor(a!) out, Tensor(b!) membership, Tensor(c!) energy, Tensor(d!) moment, "
      "Tensor(e!)? sums_1, Tensor(f!)? sums_2) -> ()");
  m.def(
      "cuda_tssa_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy, "
      "Tensor moment, Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, float dropout_p, "
      "Tensor(a!) dw, Tensor(b!) dtemp, Tensor(c!)? dlogit, Tensor(d!)? sums_1, Tensor(e!)? sums_2) -> ()");
  m.def("cuda_tssa_causal_chunks(Tensor w, Tensor? dout, Tensor? cu_seqlens, int max_seqlen) -> int");
  m.def(
      "cuda_tssa_causal_fwd(Tensor w, Tensor temp, Tensor? denom_bias, Tensor? key_padding_mask, Tensor? cu_seqlens, "
      "int max_seqlen, Tensor? seed, float dropout_p, Tensor(a!) out, Tensor(b!) membership, Tensor(c!)? sums_1, "
      "Tensor(d!)? sums_2, Tensor(e!)? energy, Tensor(f!)? weighted, Tensor(g!)? mass, Tensor(h!)? lengths) -> ()");
  m.def(
      "cuda_tssa_causal_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, "
      "Tensor membership, Tensor? key_padding_mask, Tensor? cu_seqlens, int max_seqlen, Tensor? seed, "
      "float dropout_p, Tensor(a!) dw, Tensor(b!) dlogit, Tensor(c!)? dtemp, Tensor(d!)? ddenom_bias, "
      "Tensor(e!)? totals, Tensor(f!)? dmoments, Tensor(g!)? denergies) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CRATE_DEVICE_KEY, m) {
  m.impl("cuda_tssa_chunks", TORCH_BOX(&tssa_full::chunks));
  m.impl("cuda_tssa_fwd", TORCH_BOX(&tssa_full::forward));
  m.impl("cuda_tssa_bwd", TORCH_BOX(&tssa_full::backward));
  m.impl("cuda_tssa_causal_chunks", TORCH_BOX(&tssa_causal::chunks));
  m.impl("cuda_tssa_causal_fwd", TORCH_BOX(&tssa_causal::forward));
  m.impl("cuda_tssa_causal_bwd", TORCH_BOX(&tssa_causal::backward));
}

}  // namespace crate_kernels
