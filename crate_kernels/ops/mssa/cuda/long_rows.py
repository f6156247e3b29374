"""Plans the kernels of long rows on Hopper GPUs: csrc/mssa/cuda/long_forward.cuh.

A block owns some rows of a head, and walks over its tokens: sequences longer than those of heads.py. What is out of
range is left to others.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import POINTER
from crate_kernels.ops.mssa.call import Call
from crate_kernels.ops.mssa.cuda import heads, hopper
from crate_kernels.ops.mssa.cuda.problem import is_wide
from crate_kernels.ops.mssa.cuda.tensor_cores import TYPES
from crate_kernels.ops.mssa.splits import cdiv

_FORWARD_HEADER = "mssa/cuda/long_forward.cuh"
_TILE = 128  # tokens; kLongTile
_ROW = 128  # bytes of 64 channels
_GROUPS = {64: 3, 128: 2}  # warp groups that own 64 rows each, by channels; one more loads
_STAGES = 4

FORWARD = hopper.table("mssa_long_forward", "LONG")


class LongCall(hopper.HeadCall):
    """The same, and what the measuring kernels write."""

    cpp = "mssa::LongCall"
    _fields_ = (("numbers", POINTER), ("most", POINTER), ("blocks", ctypes.c_int32))


def _dim_of(w: Tensor) -> int:
    """Return the channels of the kernel."""
    return 64 if w.shape[-1] <= 64 else 128


def _measure_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel(_FORWARD_HEADER, f"mssa::long_measure_kernel<{TYPES[dtype]}, {dim}>")


def _forward_kernel(dtype: torch.dtype, dim: int, causal: bool) -> Kernel:
    return Kernel(_FORWARD_HEADER, f"mssa::long_forward_kernel<{TYPES[dtype]}, {dim}, {str(causal).lower()}>")


def forward_shared_bytes(dim: int) -> int:
    """Return what a block of the forward takes of shared memory, as LongForwardShape does."""
    panels = dim // 64
    own = panels * 64 * _GROUPS[dim] * _ROW
    return _STAGES * panels * _TILE * _ROW + 2 * own + 256 + _STAGES * (_TILE // 8 + 16)


def serves_forward(w: Tensor, out: Tensor, call: Call) -> bool:
    """Return whether the kernels of the forward serve a call."""
    return hopper.serves(w, call) and hopper.seqlen_of(w, call) > heads.MOST_ROWS and all(map(is_wide, (w, out)))


def take_forward(w: Tensor, out: Tensor, call: Call) -> bool:
    """Return whether long rows take a forward: they serve it, and were chosen."""
    return serves_forward(w, out, call) and hopper.chosen(FORWARD, w, call)


def forward(w: Tensor, call: Call, out: Tensor, lse: Tensor) -> Tensor:
    """Write ``out`` and ``lse``, and return how many of each head's last tokens are left: (heads,) int32.

    ``lse`` is contiguous, and ``out`` has rows of whole packs of 16 bytes.
    """
    dim, seqlen = _dim_of(w), hopper.seqlen_of(w, call)
    parameters, left = hopper.parameters(LongCall, w, call, lse)
    tiles, groups = cdiv(seqlen, _TILE), _GROUPS[dim]
    parameters.out = hopper.tokens(out, call)
    parameters.numbers = lse.new_empty(*lse.shape, 2)
    parameters.most = lse.new_empty(len(left), tiles)
    parameters.blocks = cdiv(seqlen, 64 * groups)
    launch.run(_measure_kernel(w.dtype, dim), Shape(len(left) * tiles, _TILE), [parameters], w.device)
    shape = Shape(len(left) * parameters.blocks, 128 * (groups + 1), forward_shared_bytes(dim))
    launch.run(_forward_kernel(w.dtype, dim, call.causal), shape, [parameters], w.device)
    return left


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [
        *(_measure_kernel(dtype, dim) for dtype in TYPES for dim in _GROUPS),
        *(_forward_kernel(dtype, dim, causal) for dtype in TYPES for dim in _GROUPS for causal in (False, True)),
    ]
