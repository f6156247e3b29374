"""Split tokens into heads and merge them, without a copy."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from crate_kernels._core import checks, operator
from crate_kernels.ops.mssa import SubspaceCache

# Reasons why a process needs the whole projection.
SOFTMAX_OVER_HEADS = "the softmax is over the heads, so shard the tokens or the batch instead"
THREE_PARTS = "queries, keys and values follow each other in it, so a part mixes them"


def tokens(owner: str, x: Tensor, dim: int) -> None:
    """Require (batch, seqlen, dim) tokens: Linear accepts other ranks, so the error would come much later."""
    layout = f"(batch, seqlen, dim={dim})"
    if checks.tensor(owner, "x", x, 3, layout).shape[-1] != dim:
        raise ValueError(f"{owner}: x must be {layout}, got {tuple(x.shape)}")


def split(projected: Tensor, heads: int) -> Tensor:
    """View (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim)."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def split_local(owner: str, projected: Tensor, head_dim: int) -> Tensor:
    """View (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim), for any number of heads.

    Under tensor parallelism each process projects onto its own heads; only head_dim is the same on all.
    """
    width = projected.shape[-1]
    if width % head_dim:
        raise ValueError(
            f"{owner}: the projection must give whole heads of {head_dim}, got a width of {width}; "
            "shard it over a number of processes that divides the heads"
        )
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def whole(owner: str, projected: Tensor, width: int, reason: str) -> Tensor:
    """Require the whole projection, not one process's part of it; return it."""
    if projected.shape[-1] != width:
        raise NotImplementedError(
            f"{owner}: the projection must be whole, {width} wide, got {projected.shape[-1]}: {reason}"
        )
    return projected


def dropout_p(owner: str, dropout: nn.Dropout, w: Tensor, heads: int) -> float:
    """Return the dropout rate of the attention, as ``check_dropout`` does."""
    return check_dropout(owner, dropout.p if dropout.training else 0.0, w, heads)


def check_dropout(owner: str, rate: float, w: Tensor, heads: int) -> float:
    """Return the dropout rate of the attention, which must be 0 if w has only some of the ``heads``.

    Masks depend on the index of a head within its process. Tensor parallelism needs one seed on all processes, so
    all processes would draw the same masks.
    """
    if rate and w.shape[1] != heads:
        raise NotImplementedError(
            f"{owner}: dropout must be 0 where heads are sharded ({w.shape[1]} of {heads} are here), got {rate}: "
            "all processes would draw the same masks"
        )
    return rate


def is_sharded(tensor: Tensor) -> bool:
    """Say if a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "device_mesh")


def unproject(out: Tensor, weight: Tensor) -> Tensor:
    """Return ``out W`` for (batch, seqlen, heads * head_dim) and the projection's own weight W.

    Under tensor parallelism W is a DTensor: each process multiplies its heads by its part, and all processes sum.
    """
    if is_sharded(out) or not is_sharded(weight):
        return out @ weight
    from torch.distributed.tensor import DTensor, Replicate, Shard  # not every PyTorch has it

    sharded = cast(DTensor, weight)
    placements = [Shard(out.dim() - 1) if each.is_shard(0) else Replicate() for each in sharded.placements]
    product = DTensor.from_local(out, sharded.device_mesh, placements, run_check=False) @ sharded
    return cast(DTensor, product).full_tensor()


def local_heads(projection: nn.Linear, heads: int) -> int:
    """Return how many of the heads this process projects onto: all but under tensor parallelism.

    ``fully_shard`` cuts the weight too, but gathers it for every call. Its dimensions of the mesh come first.
    """
    weight = cast(Any, projection.weight)
    if not is_sharded(weight) or not getattr(projection, "_distribute_module_applied", False):
        return heads
    return heads // weight.device_mesh.size(-1) if weight.placements[-1].is_shard(0) else heads


def merge(out: Tensor) -> Tensor:
    """View (batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return out.transpose(1, 2).flatten(2)


def subspace_cache(projection: nn.Linear, heads: int, batch: int, max_seqlen: int) -> SubspaceCache:
    """Return an empty cache for the output of ``projection`` here, in the dtype of ``mssa``'s input."""
    weight, head_dim = projection.weight, projection.out_features // heads
    dtype = weight.dtype
    if dtype != torch.float64:
        dtype = operator.autocast_dtype(weight) or dtype
    return SubspaceCache(batch, local_heads(projection, heads), max_seqlen, head_dim, dtype, weight.device)
