"""The published forms, restated naively: what users run today, and what speed-ups are speed-ups of.

Eager PyTorch, one operator after another, in the dtype of its input. Sources are named beside each; the words are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def mssa(w: Tensor, causal: bool = False) -> Tensor:
    """CRATE's ``Attention`` and causal CRATE's: every score, its softmax and its product, each a tensor."""
    scores = w @ w.transpose(-1, -2) * w.shape[-1] ** -0.5
    if causal:
        seqlen = w.shape[-2]
        future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=w.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ w


def tssa(w: Tensor, temp: Tensor) -> Tensor:
    """ToST's ``AttentionTSSA``: tokens normalised along the sequence, memberships, second moments."""
    normed = F.normalize(w, dim=-2)
    membership = ((normed**2).sum(-1) * temp.view(-1, 1)).softmax(dim=1)
    shares = membership / (membership.sum(-1, keepdim=True) + 1e-8)
    moments = shares.unsqueeze(-2) @ w**2
    return -(w * membership.unsqueeze(-1)) * (1 / (1 + moments))


def tssa_causal(w: Tensor, temp: Tensor, denom_bias: Tensor) -> Tensor:
    """ToST's ``CausalSelfAttention_TSSA``: running sums in place of sums."""
    energy = w**2
    normed = energy / energy.cumsum(-2).clamp_min(1e-12) + denom_bias[:, : w.shape[2]]
    membership = (normed.sum(-1) * temp.view(-1, 1)).softmax(dim=1)
    moments = (energy * membership.unsqueeze(-1)).cumsum(-2) / (membership.cumsum(-1) + 1e-8).unsqueeze(-1)
    return -(w * membership.unsqueeze(-1)) * (1 / (1 + moments))


def ista(x: Tensor, weight: Tensor, step_size: float = 0.1, lambd: float = 0.1) -> Tensor:
    """CRATE's ``FeedForward``: three products, then the step and the threshold."""
    back = F.linear(F.linear(x, weight), weight.t())
    return F.relu(x + step_size * (F.linear(x, weight.t()) - back) - step_size * lambd)


def ista_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None = None, step_size: float = 0.1, lambd: float = 0.1
) -> Tensor:
    """CRATE-alpha's ``OvercompleteISTABlock``: two steps from zero, then the decoder."""
    code = F.relu(step_size * (x @ weight) - step_size * lambd)
    residual = code @ weight.t() - x
    code = F.relu(code - step_size * (residual @ weight) - step_size * lambd)
    return code @ (weight if decoder is None else decoder).t()
