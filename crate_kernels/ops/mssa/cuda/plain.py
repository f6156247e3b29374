"""Launches the kernels by fp32 products: csrc/mssa/cuda/plain_*.cuh. They take every call, on every GPU."""

from __future__ import annotations

from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels.ops.mssa.cuda.problem import MssaProblem
from crate_kernels.ops.mssa.splits import cdiv

# As plain.cuh has them: threads of a block, its rows, the rows of a tile, channels at a time, and floats between rows.
_THREADS, _OWNED, _TILE, _CHUNK = 128, 64, 32, 64
_PITCH, _WEIGHT_PITCH = _CHUNK + 4, _TILE + 8
_MAX_CHUNKS = 2  # of the output, that a block accumulates at once
# Bytes of shared memory.
_FORWARD_SHARED = 4 * ((_OWNED + _TILE) * _PITCH + _OWNED * _WEIGHT_PITCH)
_BACKWARD_SHARED = 4 * (2 * (_OWNED + _TILE) * _PITCH + _OWNED * _WEIGHT_PITCH)
_DELTA_SHARED = 4 * 2 * _OWNED * _PITCH
_MEASURE_SHARED = 4 * (2 * _OWNED + _TILE) * _PITCH

_DELTA = Kernel("mssa/cuda/plain_delta.cuh", "plain::mssa_plain_delta_kernel")
_MEASURE = Kernel("mssa/cuda/plain_delta.cuh", "plain::mssa_plain_measure_kernel")


def _forward_kernel(chunks: int, apart: bool) -> Kernel:
    arguments = f"<{chunks}, {str(apart).lower()}>"
    return Kernel("mssa/cuda/plain_forward.cuh", f"plain::mssa_plain_fwd_kernel{arguments}")


def _backward_kernel(chunks: int, apart: bool) -> Kernel:
    arguments = f"<{chunks}, {str(apart).lower()}>"
    return Kernel("mssa/cuda/plain_backward.cuh", f"plain::mssa_plain_bwd_kernel{arguments}")


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    forms = [(chunks, apart) for chunks in (1, _MAX_CHUNKS) for apart in (False, True)]
    return [_DELTA, _MEASURE, *(kernel(*form) for kernel in (_forward_kernel, _backward_kernel) for form in forms)]


def _launch(kernel: Kernel, fields: dict, w: Tensor, shared_bytes: int, grouped: bool = True) -> None:
    """Launch a block for each stretch of rows, and for each group of channels if the kernel has groups."""
    blocks = max(cdiv(fields["seqlen"], _OWNED), 1)
    groups = cdiv(w.shape[-1], _MAX_CHUNKS * _CHUNK)
    count = fields["sequences"] * fields["nheads"] * blocks * (groups if grouped else 1)
    parameters = MssaProblem(**fields, blocks=blocks, groups=groups)
    launch.run(kernel, Shape(count, _THREADS, shared_bytes), [parameters], w.device)


def _chunks(w: Tensor) -> int:
    return 1 if w.shape[-1] <= _CHUNK else _MAX_CHUNKS


def find_delta(fields: dict, w: Tensor) -> None:
    """Write delta from dout and out, summed in the backward's order."""
    _launch(_DELTA, fields, w, _DELTA_SHARED, grouped=False)


def forward(fields: dict, w: Tensor, apart: bool = False) -> None:
    """Launch a forward; ``apart``: the rows meet another range of their sequence."""
    _launch(_forward_kernel(_chunks(w), apart), fields, w, _FORWARD_SHARED)


def backward(fields: dict, w: Tensor, apart: bool = False) -> None:
    """Launch a backward. With a threshold, a forward writes what it needs first; ranges get it passed."""
    if fields.get("select_level") is not None:
        forward(fields, w)
    elif not apart:
        if fields["products"] and fields["seed"] is None:
            find_delta(fields, w)
        _launch(_MEASURE, fields, w, _MEASURE_SHARED, grouped=False)
    _launch(_backward_kernel(_chunks(w), apart), fields, w, _BACKWARD_SHARED)
