"""A product whose programs stay: each takes tile after tile, moved by the memory accelerator of sm_90 and later (TMA).

``act(base + scale * left @ right)`` of 16-bit tensors. A tile is finished in two halves of its columns, so that fewer
registers hold it: two programs fit on a multiprocessor, and one multiplies while the other finishes. Descriptors of the
tensors are made on the device, in memory that Triton asks for at each launch. What is beyond a tensor is read as zero
and never written. A NaN stays one: the threshold compares, and takes no maximum.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch

_ARCHITECTURES = ("sm_90", "sm_100", launch.INTERPRETER)
_RESIDENT = 2  # programs of a multiprocessor


@triton.jit
def activate(acc, threshold, ACTIVATION: tl.constexpr):
    """Return ``acc``, or the threshold of it: 1 for ReLU, 2 for the two-sided one."""
    if ACTIVATION == 1:
        acc -= threshold
        acc = tl.where(acc < 0, 0.0, acc)
    elif ACTIVATION == 2:
        size = tl.abs(acc) - threshold
        acc = tl.where(size < 0, 0.0, tl.where(acc < 0, -size, size))
    return acc


@triton.jit
def _finish_half(acc, base, out, m, n, scale, threshold, ACTIVATION: tl.constexpr):
    """Store half a tile from its product; ``base`` may be None."""
    acc *= scale
    if base is not None:
        acc += base.load([m, n]).to(tl.float32)
    out.store([m, n], activate(acc, threshold, ACTIVATION).to(out.dtype))


@triton.jit(do_not_specialize=("rows", "programs"))
def _ista_stream_kernel(
    left_ptr,
    right_ptr,
    base_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    programs,
    scale,
    threshold,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute every ``programs``-th (BLOCK_M, BLOCK_N) tile; TRANSPOSED: ``right`` is (columns, inner) in memory."""
    HALF: tl.constexpr = BLOCK_N // 2
    left = tl.make_tensor_descriptor(left_ptr, [rows, inner], [inner, 1], [BLOCK_M, BLOCK_K])
    if TRANSPOSED:
        right = tl.make_tensor_descriptor(right_ptr, [columns, inner], [inner, 1], [BLOCK_N, BLOCK_K])
    else:
        right = tl.make_tensor_descriptor(right_ptr, [inner, columns], [columns, 1], [BLOCK_K, BLOCK_N])
    if base_ptr is None:
        base = None
    else:
        base = tl.make_tensor_descriptor(base_ptr, [rows, columns], [columns, 1], [BLOCK_M, HALF])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [BLOCK_M, HALF])
    across = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * across, programs):
        m, n = tile // across * BLOCK_M, tile % across * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, inner, BLOCK_K):
            if TRANSPOSED:
                acc = tl.dot(left.load([m, k]), right.load([n, k]).T, acc)  # (BLOCK_M, BLOCK_N)
            else:
                acc = tl.dot(left.load([m, k]), right.load([k, n]), acc)  # (BLOCK_M, BLOCK_N)
        first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))  # (BLOCK_M, HALF)
        _finish_half(first, base, out, m, n, scale, threshold, ACTIVATION)
        _finish_half(second, base, out, m, n + HALF, scale, threshold, ACTIVATION)


def serves(left: Tensor, right: Tensor, base: Tensor | None, out: Tensor) -> bool:
    """Return whether a product is one of this form: 16 bits, rows of whole 16 bytes, and a GPU that moves tiles."""
    present = [t for t in (left, right, base, out) if t is not None]
    return (
        launch.arch(left.device) in _ARCHITECTURES
        and all(t.dtype == right.dtype and t.element_size() == 2 for t in present)
        and left.shape[1] % 8 == 0 == out.shape[1] % 8
        and (right.is_contiguous() or right.t().is_contiguous())
        and all(t.data_ptr() % 16 == 0 for t in present if t.device.type != "meta")
    )


def product(left: Tensor, right: Tensor, out: Tensor, epilogue: dict[str, Any], config: dict[str, int]) -> None:
    """Write ``act(base + scale * left @ right)`` to ``out``."""
    (rows, columns), inner = out.shape, left.shape[1]
    tiles = triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
    programs = min(tiles, _RESIDENT * launch.multiprocessors(left.device))
    names = ("base_ptr", "scale", "threshold", "ACTIVATION")
    with launch.scratch(left.device):
        launch.run(
            _ista_stream_kernel,
            programs,
            left_ptr=left,
            right_ptr=right,
            out_ptr=out,
            rows=rows,
            columns=columns,
            inner=inner,
            programs=programs,
            TRANSPOSED=not right.is_contiguous(),
            **{name: epilogue[name] for name in names},
            **config,
        )
