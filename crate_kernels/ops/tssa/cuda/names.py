"""The CUDA C++ kernels of token statistics, by name."""

from __future__ import annotations

import functools

from crate_kernels._cuda.launch import Kernel

FULL, CAUSAL = ("TssaFloats", "TssaHalves", "TssaScalars"), ("TssaFours", "TssaScalars")  # accesses to tokens
SCAN = Kernel("tssa/cuda/scan.cuh", "tssa_scan_chunks_kernel")
DBIAS = Kernel("tssa/cuda/causal_bias.cuh", "tssa_causal_dbias_kernel")


@functools.cache
def resident(access: str, backward: bool) -> Kernel:
    """Return the kernel of the full form that has a sequence on chip."""
    header, name = ("full_backward", "bwd") if backward else ("full", "fwd")
    return Kernel(f"tssa/cuda/{header}.cuh", f"tssa_full_{name}_resident_kernel<{access}>")


@functools.cache
def full_steps(access: str, backward: bool) -> tuple[Kernel, ...]:
    """List the steps of the full form in chunks."""
    header, name, step = ("full_backward", "bwd", "Backward") if backward else ("full", "fwd", "")
    steps = ("dgate", "dlogit", "dw") if backward else ("energy", "members", "output")
    kernel = f"tssa_full_{name}_chunk_kernel<{access}, Tssa{step}Step"
    return tuple(Kernel(f"tssa/cuda/{header}.cuh", f"{kernel}::{each}>") for each in steps)


@functools.cache
def causal_steps(access: str, backward: bool) -> tuple[Kernel, ...]:
    """List the steps of the causal form."""
    if backward:
        names = (f"bwd_kernel<{access}, TssaCausalBackwardStep::{s}>" for s in ("totals", "dmoment", "dlogit", "dw"))
    else:
        names = (f"fwd_{s}_kernel<{access}>" for s in ("energy", "members", "output"))
    header = "causal_backward_steps" if backward else "causal_forward"
    return tuple(Kernel(f"tssa/cuda/{header}.cuh", f"tssa_causal_{name}") for name in names)


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    found = [SCAN, DBIAS]
    for backward in (False, True):
        found += (resident(access, backward) for access in FULL[:2])
        found += (kernel for access in FULL for kernel in full_steps(access, backward))
        found += (kernel for access in CAUSAL for kernel in causal_steps(access, backward))
    return found
