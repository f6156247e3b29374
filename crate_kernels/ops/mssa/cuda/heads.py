"""Plans the kernels of whole heads on Hopper GPUs: csrc/mssa/cuda/head_forward.cuh, head_backward.cuh.

A block keeps every token of a head in shared memory: at most 256, in the backward of more than 64 channels 224, or 208
where tokens may be masked. Heads whose norms (forward) or lse (backward) spread further than the kernel's range are
left to others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import hopper
from crate_kernels.ops.mssa.cuda.problem import is_wide
from crate_kernels.ops.mssa.cuda.tensor_cores import TYPES

_FORWARD, _BACKWARD = "mssa/cuda/head_forward.cuh", "mssa/cuda/head_backward.cuh"
MAX_ROWS = 256
_MULTIPROCESSOR = 233472  # bytes of shared memory
_ROW = 128  # bytes of 64 channels

FORWARD, BACKWARD = (hopper.table(f"mssa_heads_{direction}", "WHOLE") for direction in ("forward", "backward"))


def _columns_bytes(rows: int, tail: int) -> int:
    """Return what the weights of the last ``tail`` columns take, for every row."""
    pitch = 32 if tail <= 16 else 64 if tail <= 32 else 128
    return -(-rows * pitch // 1024) * 1024 if tail else 0


def shared_bytes(dim: int, rows: int, masked: bool) -> int | None:
    """Return what a block takes of shared memory, as HeadBackwardShape does; None if that is more than there is."""
    blocks, panels = min(rows // 64, 3), -(-dim // 64)
    columns = _columns_bytes(rows, rows - 64 * blocks)
    stage = (3 if masked else 2) * panels * rows * _ROW
    rest = blocks * panels * 64 * _ROW + 2 * columns + 2048 + 256
    return next((n * stage + rest for n in (2, 1) if n * stage + rest <= hopper.SHARED), None)


def _max_blocks_per_sm(dim: int) -> int:
    """Return how many blocks of the forward a multiprocessor has registers for."""
    return 3 if dim <= 112 else 2


def forward_shared_bytes(dim: int, rows: int) -> int:
    """Return what a block of the forward takes of shared memory, as HeadForwardShape does."""
    tail, panels = rows % 64, -(-dim // 64)
    stage = panels * rows * _ROW
    rest = panels * 64 * _ROW + _columns_bytes(rows, tail) + 128 * tail + 2560
    two = 2 * stage + rest
    return two if _max_blocks_per_sm(dim) * (two + 1024) <= _MULTIPROCESSOR else stage + rest


def shape_of(seqlen: int, head_dim: int) -> tuple[int, int]:
    """Return the channels and rows of the kernel that serves sequences of at most ``seqlen`` tokens."""
    return -(-head_dim // 16) * 16, max(-(-seqlen // 16) * 16, 64)


def _kernel(dtype: torch.dtype, dim: int, rows: int, masked: bool, causal: bool) -> Kernel:
    options = f"{str(masked).lower()}, {str(causal).lower()}"
    return Kernel(_BACKWARD, f"mssa::head_backward_kernel<{TYPES[dtype]}, {dim}, {rows}, {options}>")


def _forward_kernel(dtype: torch.dtype, dim: int, rows: int, causal: bool) -> Kernel:
    return Kernel(_FORWARD, f"mssa::head_forward_kernel<{TYPES[dtype]}, {dim}, {rows}, {str(causal).lower()}>")


def backward_fits(w: Tensor, call: MSSACall) -> bool:
    """Return whether the shared memory of a block holds what a backward keeps of a head."""
    seqlen = hopper.seqlen_of(w, call)
    return seqlen <= MAX_ROWS and shared_bytes(*shape_of(seqlen, w.shape[-1]), call.padded) is not None


def serves_forward(w: Tensor, out: Tensor, call: MSSACall) -> bool:
    """Return whether the kernel of the forward serves a call."""
    return hopper.serves(w, call) and hopper.seqlen_of(w, call) <= MAX_ROWS and all(map(is_wide, (w, out)))


def serves_backward(w: Tensor, dout: Tensor | None, out: Tensor, call: MSSACall) -> bool:
    """Return whether the kernel of the backward serves a call."""
    return dout is not None and hopper.serves(w, call) and backward_fits(w, call) and all(map(is_wide, (w, dout, out)))


def forward(w: Tensor, call: MSSACall, out: Tensor, lse: Tensor) -> Tensor:
    """Write ``out`` and ``lse``, and return how many of each head's last tokens are left: (heads,) int32.

    ``lse`` is contiguous, and ``out`` has rows of whole packs of 16 bytes.
    """
    dim, rows = shape_of(hopper.seqlen_of(w, call), w.shape[-1])
    parameters, left = hopper.parameters(hopper.HeadCall, w, call, lse)
    parameters.out = hopper.tokens(out, call)
    bytes_ = forward_shared_bytes(dim, rows)
    blocks_per_sm = min(_MULTIPROCESSOR // (bytes_ + 1024), _max_blocks_per_sm(dim))
    shape = Shape(min(len(left), blocks_per_sm * launch.gpu(w.device).multiprocessors), 128, bytes_)
    launch.run(_forward_kernel(w.dtype, dim, rows, call.causal), shape, [parameters], w.device)
    return left


def backward(
    dout: Tensor, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall, dw: Tensor
) -> Tensor:
    """Write the gradient of ``w`` to ``dw``, and return how many tokens of each head are left, all or none.

    ``lse`` and ``dlse`` are contiguous, and ``dw`` has rows of whole packs of 16 bytes.
    """
    dim, rows = shape_of(hopper.seqlen_of(w, call), w.shape[-1])
    bytes_ = shared_bytes(dim, rows, call.padded)
    assert bytes_ is not None
    parameters, left = hopper.parameters(hopper.HeadCall, w, call, lse)
    parameters.dout, parameters.out, parameters.dw = (
        hopper.tokens(dout, call),
        hopper.tokens(out, call),
        hopper.tokens(dw, call),
    )
    parameters.dlse = dlse
    # A block stays on its multiprocessor and takes one head after another. Smaller heads share a multiprocessor.
    blocks_per_sm = max(hopper.SHARED // (bytes_ + 1024), 1)
    shape = Shape(
        min(len(left), blocks_per_sm * launch.gpu(w.device).multiprocessors), 128 * min(rows // 64, 3), bytes_
    )
    launch.run(_kernel(w.dtype, dim, rows, call.padded, call.causal), shape, [parameters], w.device)
    return left


def kernels() -> list[Kernel]:
    """List kernels of published sizes, of which registers are recorded; a call may need another of ``every_kernel``."""
    backwards = [(64, 208, False), (64, 208, True), (48, 208, False), (32, 208, False), (128, 208, False)]
    backwards += [(64, 64, False), (64, 256, False)]
    backwards += [(64, 256, True), (128, 208, True), (128, 224, False)]  # those with the fewest registers left
    forwards = [(64, 208), (48, 208), (32, 208), (128, 208), (64, 64), (64, 256), (128, 256)]
    forwards += [(64, 112), (32, 112), (128, 96)]  # those with the most registers
    return [
        *(_kernel(dtype, *shape, causal) for dtype in TYPES for shape in backwards for causal in (False, True)),
        *(_forward_kernel(dtype, *shape, causal) for dtype in TYPES for shape in forwards for causal in (False, True)),
    ]


def every_kernel(dim: int, causal: bool) -> list[Kernel]:
    """List every kernel that calls of so many channels, a multiple of 16, launch."""
    lengths = range(64, MAX_ROWS + 1, 16)
    return [
        *(_forward_kernel(dtype, dim, rows, causal) for dtype in TYPES for rows in lengths),
        *(
            _kernel(dtype, dim, rows, masked, causal)
            for dtype in TYPES
            for rows in lengths
            for masked in (False, True)
            if shared_bytes(dim, rows, masked) is not None
        ),
    ]
