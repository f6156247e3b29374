"""Attention probabilities, which a fused kernel never stores."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import checks

from ._inputs import trailing


@checks.suggesting
def attention_maps(w: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Return MSSA's attention probabilities: row i has the weights of query i on each key.

    ``P = softmax(scale w w^T)`` (CRATE Eq. 11), masked to keys j <= i if causal.

    Args:
        w: Projected tokens (..., seqlen, head_dim), any floating dtype; a model's ``qkv`` output with its
            heads split off, ``qkv(x).unflatten(-1, (nheads, -1)).transpose(-3, -2)``.
        causal: True if a query sees only keys up to its own position, by default False.
        scale: Factor on ``w w^T``, by default ``head_dim ** -0.5``.

    Returns:
        Probabilities (..., seqlen, seqlen), float32, or float64 if w is.

    Raises:
        ValueError: w lacks the two axes, has an empty one or is not floating; scale is not finite.
        TypeError: w is not a Tensor, causal not a bool or scale not a number.
    """
    w = trailing("attention_maps", "w", w, "(..., seqlen, head_dim)")
    w = w.to(torch.promote_types(w.dtype, torch.float32))
    causal = checks.flag("attention_maps", "causal", causal)
    factor = w.shape[-1] ** -0.5 if scale is None else checks.number("attention_maps", "scale", scale)
    with torch.autocast(w.device.type, enabled=False):
        scores = factor * (w @ w.mT)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=w.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1)
