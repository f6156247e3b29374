"""Plans the backward of long rows by pairs, on Hopper GPUs: csrc/mssa/cuda/long_pairs.cuh.

It has fewer products than that of long_rows.py, and adds to fp32 in any order: the last bits of a gradient differ from
run to run. Under ``torch.use_deterministic_algorithms(True)`` nothing takes it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import hopper, long_rows
from crate_kernels.ops.mssa.cuda.tensor_cores import TYPES
from crate_kernels.ops.mssa.splits import cdiv

_HEADER = "mssa/cuda/long_pairs.cuh"
_DIMS = (64, 128)
_GROUPS, _TILE, _STAGES = 2, 64, 3
_ROW = 128  # bytes of 64 channels

BACKWARD = hopper.table("mssa_long_pairs", "PAIRS")


def shared_bytes(dim: int, both: bool) -> int:
    """Return what a block takes of shared memory, as LongPairsShape does."""
    panels, rows = dim // 64, 64 * _GROUPS
    weights = (2 if both else 1) * rows * _ROW
    return _STAGES * (2 * panels * _TILE * _ROW + 8 * _TILE + 16) + 2 * panels * rows * _ROW + weights


def _pairs_kernel(dtype: torch.dtype, dim: int, both: bool) -> Kernel:
    return Kernel(_HEADER, f"mssa::long_pairs_kernel<{TYPES[dtype]}, {dim}, {str(both).lower()}>")


def _round_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel(_HEADER, f"mssa::long_round_kernel<{TYPES[dtype]}, {dim}>")


def serves_backward(w: Tensor, dout: Tensor | None, out: Tensor, call: MSSACall) -> bool:
    """Return whether the kernels serve a call, and sums may be added in any order."""
    return long_rows.serves_backward(w, dout, out, call) and not torch.are_deterministic_algorithms_enabled()


def backward(
    dout: Tensor, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall, dw: Tensor
) -> Tensor:
    """Write the gradient of ``w`` to ``dw``, and return what is left, as ``long_rows.gradient`` says."""
    dim, both = long_rows.dim_of(w), not (call.causal or call.padded)
    parameters, left = long_rows.gradient(dout, dlse, w, out, lse, call, dw)
    heads, tiles = parameters.heads, cdiv(parameters.seqlen, _TILE)
    if call.packed:
        parameters.sum_tiles = parameters.total // _TILE + heads // parameters.nheads
        parameters.sums = lse.new_empty(parameters.nheads, parameters.sum_tiles, _TILE * dim)
    else:
        parameters.sum_tiles = tiles
        parameters.sums = lse.new_empty(heads, tiles, _TILE * dim)
    parameters.blocks = cdiv(parameters.seqlen, 64 * _GROUPS)
    long_rows.scale_gradients(parameters, w, call)
    shape = Shape(heads * parameters.blocks, 128 * (_GROUPS + 1), shared_bytes(dim, both))
    arguments = [parameters, ctypes.c_int32(call.causal)]
    launch.run(_pairs_kernel(w.dtype, dim, both), shape, arguments, w.device)
    shape = Shape(heads * tiles, 128, dim // 64 * _TILE * _ROW)
    launch.run(_round_kernel(w.dtype, dim), shape, [parameters], w.device)
    return left


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [
        *(_pairs_kernel(dtype, dim, both) for dtype in TYPES for dim in _DIMS for both in (True, False)),
        *(_round_kernel(dtype, dim) for dtype in TYPES for dim in _DIMS),
    ]
