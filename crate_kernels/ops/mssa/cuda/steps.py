"""Launches the kernels of steps with a cache: csrc/mssa/cuda/decode.cuh. Nothing here waits for the GPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import CPP_TYPES, POINTER
from crate_kernels.ops.mssa.cuda.problem import MssaProblem
from crate_kernels.ops.mssa.splits import cdiv

_HEADER = "mssa/cuda/decode.cuh"
_THREADS, _WARP, _PACK = 128, 32, 16
GROUP = 4  # tokens of a block, if it has several
_ADVANCE = Kernel(_HEADER, "decoding::mssa_advance_kernel")


class MssaStep(MssaProblem):
    """A forward of the new tokens whose keys are the cache."""

    cpp = "decoding::Step"
    _fields_ = (("part", POINTER), ("statistics", POINTER), ("splits", ctypes.c_int), ("lanes", ctypes.c_int))


def decode_kernel(dtype: torch.dtype, tokens: int, vectors: int) -> Kernel:
    """Return the kernel of so many tokens a block, and packs a lane."""
    return Kernel(_HEADER, f"decoding::mssa_decode_kernel<{CPP_TYPES[dtype]}, {tokens}, {vectors}>")


def _combine_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel(_HEADER, f"decoding::mssa_decode_combine_kernel<{CPP_TYPES[dtype]}>")


def _append_kernel(dtype: torch.dtype) -> Kernel:
    return Kernel(_HEADER, f"decoding::mssa_append_kernel<{CPP_TYPES[dtype]}>")


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    wide = [decode_kernel(torch.float32, tokens, 2) for tokens in (1, GROUP)]
    narrow = [decode_kernel(dtype, tokens, 1) for dtype in CPP_TYPES for tokens in (1, GROUP)]
    return [*wide, *narrow, *map(_combine_kernel, CPP_TYPES), *map(_append_kernel, CPP_TYPES), _ADVANCE]


def _heads(fields: dict) -> int:
    return fields["sequences"] * fields["nheads"]


def step(fields: dict, w: Tensor, part: Tensor, statistics: Tensor) -> None:
    """Append, attend with one reading of the cache, and advance the lengths.

    ``part`` (heads, splits, new, head_dim) and ``statistics`` (heads, splits, new, 2) are scratch.

    Raises:
        ValueError: tokens are no rows of whole 16 bytes.
    """
    if not (fields["w"].wide and fields["keys"].wide):
        raise ValueError(f"mssa: tokens must be rows of whole 16 bytes, got head_dim {w.shape[-1]}")
    new, head_dim, splits = fields["seqlen"], w.shape[-1], part.shape[1]
    packs, lanes = cdiv(head_dim * w.element_size(), _PACK), 1
    while lanes < min(packs, _WARP):
        lanes *= 2
    tokens = 1 if new == 1 else GROUP
    vectors = 2 if packs > lanes else 1  # of fp32 alone: 256 halves are a pack a lane
    blocks = cdiv(new, tokens)
    arguments = {**fields, "part": part, "statistics": statistics, "splits": splits, "lanes": lanes}
    attends, combines = decode_kernel(w.dtype, tokens, vectors), _combine_kernel(w.dtype)
    for kernel in (attends, combines):  # before either writes to the cache: one may not compile
        launch.function(kernel, w.device, (MssaStep,))
    shape = Shape(_heads(fields) * blocks * splits, _THREADS, 4 * (_THREADS // _WARP) * tokens * (head_dim + 2))
    launch.run(attends, shape, [MssaStep(**arguments, blocks=blocks)], w.device)
    shape = Shape(_heads(fields) * new, cdiv(head_dim, _WARP) * _WARP)
    launch.run(combines, shape, [MssaStep(**arguments, blocks=new)], w.device)


def append(fields: dict, w: Tensor) -> None:
    """Append the new tokens to the cache, whose lengths stay."""
    blocks = cdiv(fields["seqlen"], _THREADS)
    parameters = MssaProblem(**fields, blocks=blocks)
    launch.run(_append_kernel(w.dtype), Shape(_heads(fields) * blocks, _THREADS), [parameters], w.device)


def advance(fields: dict, w: Tensor) -> None:
    """Count the new tokens in the cache's lengths."""
    launch.run(_ADVANCE, Shape(fields["sequences"], _WARP), [MssaProblem(**fields)], w.device)
