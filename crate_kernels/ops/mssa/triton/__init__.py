"""Subspace self-attention in Triton."""

from crate_kernels.ops.mssa.triton.backward import backward
from crate_kernels.ops.mssa.triton.decode import decode
from crate_kernels.ops.mssa.triton.forward import forward

__all__ = ["backward", "decode", "forward"]
