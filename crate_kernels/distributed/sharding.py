"""Cut a tensor over ranks, and put the parts together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels.distributed import collectives, layout
from crate_kernels.distributed.collectives import Group, Ranks
from crate_kernels.distributed.layout import SequenceLayout


class _Shard(torch.autograd.Function):
    """Cut; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: SequenceLayout, ranks: Ranks, dim: int) -> Tensor:
        ctx.rest = where, ranks, dim
        return where.cut(x, ranks.rank, dim)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Unshard.apply(dout, *ctx.rest), None, None, None


class _Unshard(torch.autograd.Function):
    """Gather; the gradient is cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: SequenceLayout, ranks: Ranks, dim: int) -> Tensor:
        ctx.rest = where, ranks, dim
        return where.join(ranks.gather(x, where.lengths, dim), dim)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Shard.apply(dout, *ctx.rest), None, None, None


@checks.suggesting
def shard(x: Tensor, group: Group, dim: int, balanced: bool = False) -> Tensor:
    """Return this rank's part of a tensor that all ranks have whole.

    Parts are as even as ``torch.tensor_split`` makes them; a tensor shorter than the ranks leaves some with nothing.
    The gradient is gathered: every rank gets that of the whole tensor.

    Args:
        x: the whole tensor, of any dtype, the same in all ranks.
        group: the process group, or a DeviceMesh of one dimension.
        dim: the dimension to cut, such as that of the tokens.
        balanced: cut into twice as many chunks as ranks, and give rank r chunks r and 2 P - 1 - r: under a causal mask
            all ranks then have the same work. For the forms "gather" and "ring" of ``mssa``.

    Returns:
        The part, a copy.

    Raises:
        TypeError, ValueError: a group or dimension that does not fit.
    """
    ranks, dim = _checked("shard", x, group, dim, balanced)
    return _Shard.apply(x, layout.split(x.shape[dim], ranks.size, balanced), ranks, dim)  # pyright: ignore


@checks.suggesting
def unshard(x: Tensor, group: Group, dim: int, balanced: bool = False) -> Tensor:
    """Return the whole tensor, in all ranks, of which each has a part: the inverse of ``shard``.

    What is computed from it must be the same in all ranks too; the gradient of a rank's part is its part of the whole
    gradient. Lengths are asked of all ranks first, which waits for the device.

    Args:
        x: this rank's part, of any dtype. Parts may have any lengths along ``dim``, unless ``balanced``.
        group: the process group, or a DeviceMesh of one dimension.
        dim: the dimension to put together.
        balanced: parts are the head-tail chunks of ``shard``.

    Returns:
        The whole tensor.

    Raises:
        TypeError, ValueError: a group or dimension that does not fit, or lengths that ``balanced`` does not have.
    """
    ranks, dim = _checked("unshard", x, group, dim, balanced)
    where = ranks.layout("unshard", x.shape[dim], balanced, None, x.device)
    return _Unshard.apply(x, where, ranks, dim)  # pyright: ignore[reportReturnType]


def _checked(op: str, x: Tensor, group: Group, dim: int, balanced: bool) -> tuple[Ranks, int]:
    """Return the ranks and the dimension, counted from the first."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a Tensor, got {type(x).__name__}")
    checks.flag(op, "balanced", balanced)
    if not -x.dim() <= checks.integer(op, "dim", dim) < x.dim():
        raise ValueError(f"{op}: dim must be one of the {x.dim()} dimensions of x, got {dim}")
    return collectives.ranks(op, group), dim % x.dim()
