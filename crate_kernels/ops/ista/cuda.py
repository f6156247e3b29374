"""Plans the CUDA C++ kernels of sparse coding: csrc/ista/cuda/update.cuh."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from crate_kernels._core import op_checks
from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import CPP_TYPES, DTYPES, POINTER, Record

_HEADER = "ista/cuda/update.cuh"
_UPDATE = Kernel(_HEADER, "ista_update_kernel")
_SYMMETRIZE = {dtype: Kernel(_HEADER, f"ista_symmetrize_kernel<{name}>") for dtype, name in CPP_TYPES.items()}
_THREADS, _ITEMS = 256, 8  # of an update: a block's threads, the elements of a thread
_TILE, _TILE_ROWS = 32, 8  # of a transposition: a block of _TILE * _TILE_ROWS threads has _TILE^2 elements


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [_UPDATE, *_SYMMETRIZE.values()]


class Operand(Record):
    """Elements of a tensor, of any dtype that kernels have."""

    _fields_ = (("data", POINTER), ("dtype", ctypes.c_int))


class IstaUpdate(Record):
    """The operands and options of an update."""

    _fields_ = (
        ("product", Operand),
        ("base", Operand),
        ("gated", Operand),
        ("gate", Operand),
        ("out", Operand),
        ("numel", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_float),
        ("gate_all", ctypes.c_bool),
        ("nonnegative", ctypes.c_bool),
        ("wide", ctypes.c_bool),
    )


class UpdateTerms(NamedTuple):
    """What an update adds up: scale * product + base + gated where gate is not zero; absent: not added.

    A gate without ``gated`` clears the result where it is zero.
    """

    product: Tensor | None = None
    base: Tensor | None = None
    gate: Tensor | None = None
    gated: Tensor | None = None
    scale: float = 1.0


def update(terms: UpdateTerms, threshold: float, nonnegative: bool, out: Tensor) -> None:
    """Write max(v - threshold, 0) of the terms' sum v to ``out``; two-sided: sign(v) max(|v| - threshold, 0)."""
    if terms.gate is None and terms.gated is not None:
        raise ValueError("ista: gate must be given where something is gated")
    tensors = {"product": terms.product, "base": terms.base, "gated": terms.gated, "gate": terms.gate, "out": out}
    present = {name: t for name, t in tensors.items() if t is not None}
    numel = out.numel()
    for name, t in present.items():
        op_checks.elements("ista", name, t, numel, out.device)
    parameters = IstaUpdate(
        **{name: Operand(data=t, dtype=DTYPES[t.dtype]) for name, t in present.items()},
        numel=numel,
        scale=terms.scale,
        threshold=threshold,
        gate_all=terms.gate is not None and terms.gated is None,
        nonnegative=nonnegative,
        wide=all(t.data_ptr() % 16 == 0 for t in present.values()),
    )
    blocks = -(-numel // (_THREADS * _ITEMS))
    launch.run(_UPDATE, Shape(blocks, _THREADS), [parameters], out.device)


def symmetrize(a: Tensor, both: Tensor) -> None:
    """Write a + a^T to ``both``."""
    op_checks.floating("ista", "a", a, 2)
    dim = a.shape[0]
    op_checks.elements("ista", "a", a, dim * dim, a.device)
    op_checks.tensor("ista", "both", both, a.dtype, (dim, dim), a.device)
    op_checks.elements("ista", "both", both, dim * dim, a.device)
    tiles = -(-dim // _TILE)
    shape = Shape(tiles * tiles, _TILE * _TILE_ROWS, _TILE * (_TILE + 1) * 4)
    launch.run(_SYMMETRIZE[a.dtype], shape, [a, both, ctypes.c_int64(dim)], a.device)
