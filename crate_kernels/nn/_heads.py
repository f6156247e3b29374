"""Split tokens into heads and merge them, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
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


def refuse_replayed(owner: str, layer: nn.Module, **arguments: Any) -> None:
    """Refuse what opacus loses: it runs a layer with parameters again, on the first argument alone."""
    if "ft_compute_sample_grad" in vars(layer):
        for name, value in arguments.items():
            if value is not None:
                raise NotImplementedError(
                    f"{owner}: {name} must be None under opacus, got a {type(value).__name__}: it runs the layer again "
                    "without it; take vmap of a gradient"
                )


def refuse_unseen(owner: str, projection: Any) -> None:
    """Refuse opacus on a projection whose weight is applied again outside of it, which its hooks do not see."""
    if projection._backward_hooks and projection.training and hasattr(projection.weight, "grad_sample"):
        raise NotImplementedError(
            f"{owner}: opacus must not hook the projection, whose weight is applied a second time outside of it: its "
            "gradients would lack that part; take vmap of a gradient"
        )


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
    """Say if a tensor is a DTensor, of which this process has a part."""
    return hasattr(tensor, "device_mesh")


def weight_of(projection: Any, x: Tensor) -> Tensor:
    """Return the matrix W of ``projection(x) = x W^T``, as the projection applies it to ``x`` now.

    A linear layer is asked for its weight. Any other is asked what it maps the identity to: an adapter around a layer,
    a quantised layer, one whose weights are elsewhere between its calls. Its ``weight`` is not what it applies.
    """
    if holds_its_weight(projection):
        return projection.weight
    units = F.pad(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), (0, 0, 0, 1))  # the last row asks for a bias
    # Hooks of users see the tokens alone; those of fully_shard have to run.
    mapped = projection(units) if is_sharded(projection.weight) else projection.forward(units)
    return (mapped[:-1] - mapped[-1]).mT


def holds_its_weight(projection: Any) -> bool:
    """Say if a projection is a linear layer that applies its ``weight`` as it is, here or on all processes."""
    if type(projection).forward is not nn.Linear.forward or "forward" in vars(projection):
        return False
    return _is_cut(projection) or not operator.is_wrapper(projection.weight)


def _is_cut(projection: Any) -> bool:
    """Say if a layer is cut by tensor parallelism; ``fully_shard`` cuts its weight too, but gathers it for a call."""
    return is_sharded(projection.weight) and getattr(projection, "_distribute_module_applied", False)


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


def local_heads(projection: Any, heads: int) -> int:
    """Return how many of the heads this process projects onto: all but under tensor parallelism.

    Dimensions of the mesh that ``fully_shard`` uses come first.
    """
    if not _is_cut(projection):
        return heads
    weight = projection.weight
    return heads // weight.device_mesh.size(-1) if weight.placements[-1].is_shard(0) else heads


def attend(
    owner: str,
    op: Callable[..., Tensor],
    w: Tensor,
    *args: Any,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    **options: Any,
) -> Tensor:
    """Call an operator on w (batch, heads, seqlen, head_dim); with ``cu_seqlens``, on one row of packed sequences."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            options["max_seqlen"] = max_seqlen  # which the operator refuses
        return op(w, *args, **options)
    if w.shape[0] != 1:
        raise ValueError(f"{owner}: x must be one row of packed sequences with cu_seqlens, got {w.shape[0]} rows")
    packed = op(w[0].transpose(0, 1), *args, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)
    return packed.transpose(0, 1)[None]


def merge(out: Tensor) -> Tensor:
    """View (batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return out.transpose(1, 2).flatten(2)


def kind(projection: Any) -> tuple[torch.dtype, torch.device]:
    """Return the dtype, outside autocast, and the device of a projection's output."""
    weight = projection.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():  # quantised
        place = getattr(weight, "device", None)
        weight = projection(torch.zeros(1, projection.in_features, device=place))
    if weight.is_meta:  # where accelerate moves the weight for a call
        hooks = (getattr(module, "_hf_hook", None) for module in projection.modules())
        places = (getattr(hook, "execution_device", None) for hook in hooks)
        return weight.dtype, torch.device(next((place for place in places if place is not None), "meta"))
    return weight.dtype, weight.device


def subspace_cache(projection: Any, heads: int, head_dim: int, batch: int, max_seqlen: int) -> SubspaceCache:
    """Return an empty cache for the output of ``projection`` here, in the dtype of ``mssa``'s input."""
    dtype, device = kind(projection)
    if dtype != torch.float64:
        dtype = operator.autocast_dtype(torch.empty(0, device=device)) or dtype
    return SubspaceCache(batch, local_heads(projection, heads), max_seqlen, head_dim, dtype, device)
