"""Sparse-coding steps in Triton."""

from crate_kernels.ops.ista.triton.launch import backward, backward_overcomplete, engine, forward, forward_overcomplete

__all__ = ["backward", "backward_overcomplete", "engine", "forward", "forward_overcomplete"]
