"""Subspace self-attention in Triton."""

from crate_kernels.ops.mssa.triton.launch import backward, decode, forward

__all__ = ["backward", "decode", "forward"]
