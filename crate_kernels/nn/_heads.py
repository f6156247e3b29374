"""Tokens as heads and back, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crate_kernels import _register
from crate_kernels.ops.mssa import SubspaceCache


def tokens(owner: str, x: Tensor, dim: int) -> None:
    """Require (batch, seqlen, dim) tokens: Linear would take other ranks and fail far from here."""
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"{owner}: x must be (batch, seqlen, dim={dim}), got {tuple(x.shape)}")


def split(projected: Tensor, heads: int) -> Tensor:
    """View (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim)."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(out: Tensor) -> Tensor:
    """View (batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return out.transpose(1, 2).flatten(2)


def subspace_cache(projection: nn.Linear, heads: int, batch: int, max_seqlen: int) -> SubspaceCache:
    """Return an empty cache for the tokens that ``projection`` gives, in the dtype that ``mssa`` takes them in."""
    weight = projection.weight
    dtype = weight.dtype
    if dtype != torch.float64:
        dtype = _register.autocast_dtype(weight.device.type) or dtype
    return SubspaceCache(batch, heads, max_seqlen, projection.out_features // heads, dtype, weight.device)
