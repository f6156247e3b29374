"""Token-statistics attention in Triton."""

from crate_kernels.ops.tssa.triton.causal import forward_causal
from crate_kernels.ops.tssa.triton.causal_backward import backward_causal
from crate_kernels.ops.tssa.triton.decode import decode
from crate_kernels.ops.tssa.triton.full import forward
from crate_kernels.ops.tssa.triton.full_backward import backward

__all__ = ["backward", "backward_causal", "decode", "forward", "forward_causal"]
