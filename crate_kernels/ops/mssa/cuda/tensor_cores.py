"""Launches the kernels on tensor cores, csrc/mssa/cuda/mma_*.cuh: 16-bit tokens, on GPUs of sm_80 and later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda.problem import MssaProblem
from crate_kernels.ops.mssa.splits import cdiv

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CAPABILITY, _SHARED = 80, 99 * 1024
_MAX_WARPS = 4
_SHIFT_WARPS, _SHIFT_COLUMNS = 4, 16
_PAIRS_DIM, _PAIRS_TILES = 64, 16  # kMaxTiles of mma_pairs.cuh


class _Tiles(NamedTuple):
    """Tiles of a class of head dims: those up to it, padded to it.

    A warp owns 16 * rows rows and walks over tiles of ``columns`` keys; with ``in_registers`` its operands stay there.
    These are the largest tiles without spills on sm_80 and sm_90 whose blocks of four warps fit the smallest
    shared memory of these GPUs, 99 KB. They have not been timed.
    """

    rows: int
    columns: int
    in_registers: bool

    def arguments(self, dtype: torch.dtype, dim: int) -> str:
        return f"<{TYPES[dtype]}, {dim}, {self.rows}, {self.columns}, {str(self.in_registers).lower()}>"


_FORWARD = {32: _Tiles(2, 64, True), 64: _Tiles(2, 64, True), 128: _Tiles(2, 32, False), 256: _Tiles(1, 32, False)}
_BACKWARD = {32: _Tiles(2, 64, True), 64: _Tiles(2, 64, True), 128: _Tiles(1, 32, True), 256: _Tiles(1, 16, False)}


def forward_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    """Return the kernel of the forward."""
    arguments = _FORWARD[dim].arguments(dtype, dim)
    return Kernel("mssa/cuda/mma_forward.cuh", f"mssa::mma_forward_kernel{arguments}")


def backward_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    """Return the kernel of the backward."""
    arguments = _BACKWARD[dim].arguments(dtype, dim)
    return Kernel("mssa/cuda/mma_backward_kernel.cuh", f"mssa::mma_backward_kernel{arguments}")


def _shift_kernel(dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel("mssa/cuda/mma_shift.cuh", f"mssa::mma_shift_kernel<{TYPES[dtype]}, {dim}>")


def pairs_kernel(dtype: torch.dtype) -> Kernel:
    """Return the kernel of the pair form."""
    return Kernel("mssa/cuda/mma_pairs.cuh", f"mssa::mma_pairs_kernel<{TYPES[dtype]}, {_PAIRS_DIM}>")


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [
        *(
            kernel(dtype, dim)
            for kernel in (forward_kernel, backward_kernel, _shift_kernel)
            for dtype in TYPES
            for dim in _FORWARD
        ),
        *map(pairs_kernel, TYPES),
    ]


def left_kernels() -> list[Kernel]:
    """List the kernels for what those of sm_90a leave, whose heads have at most 128 channels."""
    every = (forward_kernel, backward_kernel, _shift_kernel)
    return [_of_left(kernel(dtype, dim)) for kernel in every for dtype in TYPES for dim in _FORWARD if dim <= 128]


def _class_of(head_dim: int) -> int:
    return next(dim for dim in _FORWARD if head_dim <= dim)


def take(w: Tensor) -> bool:
    """Return whether tensor cores serve tokens on their device."""
    gpu = launch.gpu(w.device)
    return w.dtype in TYPES and gpu.capability >= _CAPABILITY and gpu.shared_limit >= _SHARED


def round_gradients(w: Tensor, call: MSSACall, has_scores: bool) -> bool:
    """Return whether the backward would round gradients of scores to subnormal fp16, and multiply them by tokens."""
    return w.dtype == torch.float16 and has_scores and abs(call.scale) < 2.0**-8


def _launch(
    kernel: Kernel, fields: dict, w: Tensor, blocks: int, threads: int, shared_bytes: int, left: Tensor | None = None
) -> None:
    """Launch a kernel with ``blocks`` blocks for each head; for those that have tokens left, if ``left`` is passed."""
    shape = Shape(fields["sequences"] * fields["nheads"] * blocks, threads, shared_bytes)
    parameters = MssaProblem(**fields, blocks=blocks)
    if left is None:
        launch.run(kernel, shape, [parameters], w.device)
    else:
        launch.run(_of_left(kernel), shape, [parameters, left], w.device)


def _of_left(kernel: Kernel) -> Kernel:
    """Return the same kernel for what those of sm_90a leave."""
    return Kernel("mssa/cuda/mma_left.cuh", kernel.name.replace("mma_", "mma_left_", 1))


def _launch_rows(
    kernel: Kernel, fields: dict, w: Tensor, rows: int, of_row: int, of_tiles: int, left: Tensor | None = None
) -> None:
    """Launch enough blocks for the longest sequence, at least one, which clears uncovered rows.

    A block has the most warps such that every multiprocessor has a block and every warp has rows.
    """
    heads, seqlen, warps = fields["sequences"] * fields["nheads"], fields["seqlen"], _MAX_WARPS
    blocks = launch.gpu(w.device).multiprocessors
    while warps > 1 and (heads * cdiv(seqlen, rows * warps) < blocks or rows * warps // 2 >= seqlen):
        warps //= 2
    block = rows * warps
    _launch(kernel, fields, w, max(cdiv(seqlen, block), 1), warps * 32, block * of_row + of_tiles, left)


def _takes_pairs(fields: dict, w: Tensor, call: MSSACall) -> bool:
    """Return whether the pair form serves a call: it has one block for each head."""
    simple = call.scale > 0 and call.threshold is None and not call.masked and not call.packed and call.seed is None
    heads = fields["sequences"] * fields["nheads"]
    fits = fields["seqlen"] <= 16 * _PAIRS_TILES and w.shape[-1] <= _PAIRS_DIM
    return simple and fits and heads >= launch.gpu(w.device).multiprocessors


def forward(fields: dict, w: Tensor, call: MSSACall, left: Tensor | None = None) -> None:
    """Launch a forward. Where ``select_level`` is wanted, it writes what a backward needs, and nothing else.

    ``left``: of how many of each head's last tokens alone, (heads,) int32.
    """
    dim = _class_of(w.shape[-1])
    if left is None and dim <= _PAIRS_DIM and _takes_pairs(fields, w, call):
        tiles = cdiv(fields["seqlen"], 16)
        shared = (tiles * 16 * _PAIRS_DIM + 2 * _PAIRS_TILES * 256) * 2 + _PAIRS_TILES * 8
        _launch(pairs_kernel(w.dtype), fields, w, 1, tiles * 32, shared)
        return
    tiles = _FORWARD[dim]
    _launch_rows(forward_kernel(w.dtype, dim), fields, w, 16 * tiles.rows, dim * 2, 2 * tiles.columns * dim * 2, left)


def backward(fields: dict, w: Tensor, call: MSSACall, left: Tensor | None = None) -> None:
    """Launch a backward; ``left``: of heads alone of which it is not 0, (heads,) int32."""
    if fields.get("select_level") is not None:
        forward(fields, w, call)
    dim = _class_of(w.shape[-1])
    rows = _SHIFT_WARPS * 16
    shared = (2 * rows + _SHIFT_COLUMNS) * dim * 2
    blocks = max(cdiv(fields["seqlen"], rows), 1)
    _launch(_shift_kernel(w.dtype, dim), fields, w, blocks, _SHIFT_WARPS * 32, shared, left)
    tiles = _BACKWARD[dim]
    of_tiles = 2 * tiles.columns * (2 * dim * 2 + 8)  # w, dout and two numbers a row
    _launch_rows(backward_kernel(w.dtype, dim), fields, w, 16 * tiles.rows, 2 * dim * 2, of_tiles, left)
