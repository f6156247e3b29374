"""Tokens as heads and back, without a copy."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from crate_kernels._core import checks, operator
from crate_kernels.ops.mssa import SubspaceCache

# Why a process cannot do with its part of a projection.
SOFTMAX_OVER_HEADS = "the softmax is over the heads, so shard the tokens or the batch instead"
THREE_PARTS = "queries, keys and values follow each other in it, so a part mixes them"


def tokens(owner: str, x: Tensor, dim: int) -> None:
    """Require (batch, seqlen, dim) tokens: Linear would take other ranks and fail far from here."""
    layout = f"(batch, seqlen, dim={dim})"
    if checks.tensor(owner, "x", x, 3, layout).shape[-1] != dim:
        raise ValueError(f"{owner}: x must be {layout}, got {tuple(x.shape)}")


def split(projected: Tensor, heads: int) -> Tensor:
    """View (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim)."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def split_local(owner: str, projected: Tensor, head_dim: int) -> Tensor:
    """View (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim), however many heads these are.

    Under tensor parallelism each process projects onto the heads it has, and only head_dim is everywhere the same.
    """
    width = projected.shape[-1]
    if width % head_dim:
        raise ValueError(
            f"{owner}: the projection must give whole heads of {head_dim}, got a width of {width}; "
            "shard it over a number of processes that divides the heads"
        )
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def whole(owner: str, projected: Tensor, width: int, reason: str) -> Tensor:
    """Require all of a projection, where a process cannot do with its part; return it."""
    if projected.shape[-1] != width:
        raise NotImplementedError(
            f"{owner}: the projection must be whole, {width} wide, got {projected.shape[-1]}: {reason}"
        )
    return projected


def dropout_p(owner: str, dropout: nn.Dropout, w: Tensor, heads: int) -> float:
    """Return the rate to drop attention at, which must be 0 where w has only some of the ``heads``.

    Masks are drawn by the number of a head among those of its process: with one seed, as tensor parallelism
    wants it elsewhere, all processes would draw the same.
    """
    rate = dropout.p if dropout.training else 0.0
    if rate and w.shape[1] != heads:
        raise NotImplementedError(
            f"{owner}: dropout must be 0 where heads are sharded ({w.shape[1]} of {heads} are here), got {rate}: "
            "all processes would draw the same masks"
        )
    return rate


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "device_mesh")


def unproject(out: Tensor, weight: Tensor) -> Tensor:
    """Return ``out W`` for (batch, seqlen, heads * head_dim) and the projection's own weight W.

    Under tensor parallelism W is a DTensor whose part here meets the heads here; the sum is over all processes.
    """
    if is_sharded(out) or not is_sharded(weight):
        return out @ weight
    from torch.distributed.tensor import DTensor, Replicate, Shard  # not every PyTorch has it

    sharded = cast(DTensor, weight)
    placements = [Shard(out.dim() - 1) if each.is_shard(0) else Replicate() for each in sharded.placements]
    product = DTensor.from_local(out, sharded.device_mesh, placements, run_check=False) @ sharded
    return cast(DTensor, product).full_tensor()


def merge(out: Tensor) -> Tensor:
    """View (batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return out.transpose(1, 2).flatten(2)


def subspace_cache(projection: nn.Linear, heads: int, batch: int, max_seqlen: int) -> SubspaceCache:
    """Return an empty cache for the tokens that ``projection`` gives, in the dtype that ``mssa`` takes them in."""
    weight = projection.weight
    dtype = weight.dtype
    if dtype != torch.float64:
        dtype = operator.autocast_dtype(weight.device.type) or dtype
    return SubspaceCache(batch, heads, max_seqlen, projection.out_features // heads, dtype, weight.device)
