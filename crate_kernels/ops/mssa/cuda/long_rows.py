"""Plans the kernels of long rows on Hopper GPUs: csrc/mssa/cuda/long_forward.cuh, long_backward.cuh.

A block owns some rows of a head, and walks over its tokens: sequences longer than those of heads.py, which its backward
has fewer of. What is out of range is left to others.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import POINTER, fields
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import heads, hopper
from crate_kernels.ops.mssa.cuda.problem import is_wide
from crate_kernels.ops.mssa.cuda.tensor_cores import TYPES
from crate_kernels.ops.mssa.splits import cdiv

_FORWARD_HEADER, _BACKWARD_HEADER = "mssa/cuda/long_forward.cuh", "mssa/cuda/long_backward.cuh"
_TILE = 128  # tokens; kLongTile
_ROW = 128  # bytes of 64 channels
_GROUPS = {64: 3, 128: 2}  # warp groups that own 64 rows each, by channels; one more loads
_STAGES = 4
_BACKWARD_TILE, _BACKWARD_STAGES = 64, 3
_RANGE_NUMBERS = 4  # kRangeNumbers

FORWARD, BACKWARD = (hopper.table(f"mssa_long_{direction}", "LONG") for direction in ("forward", "backward"))


class LongCall(hopper.HeadCall):
    """The same, and what the measuring kernels write."""

    cpp = "mssa::LongCall"
    _fields_ = (
        ("scaled", hopper.HeadTokens),
        *fields(POINTER, "numbers of_head tile_stats sums"),
        *fields(ctypes.c_int32, "blocks sum_tiles"),
    )


def dim_of(w: Tensor) -> int:
    """Return the channels of the kernel."""
    return 64 if w.shape[-1] <= 64 else 128


def _measure_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel(_FORWARD_HEADER, f"mssa::long_measure_kernel<{TYPES[dtype]}, {dim}>")


def _forward_kernel(dtype: torch.dtype, dim: int, causal: bool) -> Kernel:
    return Kernel(_FORWARD_HEADER, f"mssa::long_forward_kernel<{TYPES[dtype]}, {dim}, {str(causal).lower()}>")


def _prepare_kernel(name: str, dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel(_BACKWARD_HEADER, f"mssa::long_{name}_kernel<{TYPES[dtype]}, {dim}>")


def _backward_kernel(dtype: torch.dtype, dim: int, apart: bool) -> Kernel:
    return Kernel(_BACKWARD_HEADER, f"mssa::long_backward_kernel<{TYPES[dtype]}, {dim}, {str(apart).lower()}>")


def forward_shared_bytes(dim: int) -> int:
    """Return what a block of the forward takes of shared memory, as LongForwardShape does."""
    panels = dim // 64
    own = panels * 64 * _GROUPS[dim] * _ROW
    return _STAGES * panels * _TILE * _ROW + 2 * own + 256 + _STAGES * (_TILE // 8 + 16)


def delta_shared_bytes(dim: int) -> int:
    """Return what a block of 64 rows takes of shared memory, as LongDeltaShape does."""
    return 3 * dim // 64 * _BACKWARD_TILE * _ROW + 16


def backward_shared_bytes(dim: int) -> int:
    """Return what a block of the backward takes of shared memory, as LongBackwardShape does."""
    panels = dim // 64
    own = panels * 64 * _GROUPS[dim] * _ROW
    return _BACKWARD_STAGES * (2 * panels * _BACKWARD_TILE * _ROW + 8 * _BACKWARD_TILE + 16) + 3 * own


def serves_forward(w: Tensor, out: Tensor, call: MSSACall) -> bool:
    """Return whether the kernels of the forward serve a call."""
    return hopper.serves(w, call) and hopper.seqlen_of(w, call) > heads.MAX_ROWS and all(map(is_wide, (w, out)))


def serves_backward(w: Tensor, dout: Tensor | None, out: Tensor, call: MSSACall) -> bool:
    """Return whether the kernels of the backward serve a call."""
    return (
        dout is not None
        and hopper.serves(w, call)
        and not heads.backward_fits(w, call)
        and all(map(is_wide, (w, dout, out)))
    )


def forward(w: Tensor, call: MSSACall, out: Tensor, lse: Tensor) -> Tensor:
    """Write ``out`` and ``lse``, and return how many of each head's last tokens are left: (heads,) int32.

    ``lse`` is contiguous, and ``out`` has rows of whole packs of 16 bytes.
    """
    dim, seqlen = dim_of(w), hopper.seqlen_of(w, call)
    parameters, left = hopper.parameters(LongCall, w, call, lse)
    tiles, groups = cdiv(seqlen, _TILE), _GROUPS[dim]
    parameters.out = hopper.tokens(out, call)
    parameters.numbers = lse.new_empty(*lse.shape, 2)
    parameters.tile_stats = lse.new_empty(len(left), tiles)
    parameters.blocks = cdiv(seqlen, 64 * groups)
    launch.run(_measure_kernel(w.dtype, dim), Shape(len(left) * tiles, _TILE), [parameters], w.device)
    shape = Shape(len(left) * parameters.blocks, 128 * (groups + 1), forward_shared_bytes(dim))
    launch.run(_forward_kernel(w.dtype, dim, call.causal), shape, [parameters], w.device)
    return left


def gradient(
    dout: Tensor, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall, dw: Tensor
) -> tuple[LongCall, Tensor]:
    """Return the parameters of the kernels of a backward, and how many tokens of each head are left, all or none.

    ``lse`` and ``dlse`` are contiguous, and ``dw`` has rows of whole packs of 16 bytes.
    """
    parameters, left = hopper.parameters(LongCall, w, call, lse)
    scaled = w.new_empty(*lse.shape, w.shape[-1])  # (batch, heads, rows, channels), packed (heads, rows, channels)
    parameters.dout, parameters.out = hopper.tokens(dout, call), hopper.tokens(out, call)
    parameters.dw = hopper.tokens(dw, call)
    parameters.scaled = hopper.tokens(scaled.transpose(0, 1) if call.packed else scaled, call)
    parameters.dlse = dlse
    parameters.numbers = lse.new_empty(*lse.shape, 2)
    parameters.of_head = lse.new_empty(len(left), 2)
    parameters.tile_stats = lse.new_empty(len(left), cdiv(parameters.seqlen, _TILE), _RANGE_NUMBERS)
    return parameters, left


def scale_gradients(parameters: LongCall, w: Tensor, call: MSSACall) -> None:
    """Launch what writes g^, d^ and c, and finds which heads are left."""
    dim, tiles = dim_of(w), parameters.heads * cdiv(parameters.seqlen, _TILE)
    for name in ("range", "scale"):
        launch.run(_prepare_kernel(name, w.dtype, dim), Shape(tiles, _TILE), [parameters], w.device)
    arguments = [parameters, ctypes.c_int32(call.causal)]
    launch.run(
        _prepare_kernel("delta", w.dtype, dim), Shape(2 * tiles, 128, delta_shared_bytes(dim)), arguments, w.device
    )


def backward(
    dout: Tensor, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall, dw: Tensor
) -> Tensor:
    """Write the gradient of ``w`` to ``dw``, and return what is left, as ``gradient`` says."""
    dim, groups = dim_of(w), _GROUPS[dim_of(w)]
    parameters, left = gradient(dout, dlse, w, out, lse, call, dw)
    parameters.blocks = cdiv(parameters.seqlen, 64 * groups)
    scale_gradients(parameters, w, call)
    shape = Shape(parameters.heads * parameters.blocks, 128 * (groups + 1), backward_shared_bytes(dim))
    arguments = [parameters, ctypes.c_int32(call.causal)]
    launch.run(_backward_kernel(w.dtype, dim, call.causal or call.padded), shape, arguments, w.device)
    return left


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [
        *(_measure_kernel(dtype, dim) for dtype in TYPES for dim in _GROUPS),
        *(_forward_kernel(dtype, dim, causal) for dtype in TYPES for dim in _GROUPS for causal in (False, True)),
        *(
            _prepare_kernel(name, dtype, dim)
            for name in ("range", "scale", "delta")
            for dtype in TYPES
            for dim in _GROUPS
        ),
        *(_backward_kernel(dtype, dim, apart) for dtype in TYPES for dim in _GROUPS for apart in (False, True)),
    ]
