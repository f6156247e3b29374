"""Token-statistics attention in Triton."""

from crate_kernels.ops.tssa.triton_causal import forward_causal
from crate_kernels.ops.tssa.triton_causal_backward import backward_causal
from crate_kernels.ops.tssa.triton_decode import decode
from crate_kernels.ops.tssa.triton_full import forward
from crate_kernels.ops.tssa.triton_full_backward import backward

__all__ = ["backward", "backward_causal", "decode", "forward", "forward_causal"]
