"""Multi-head subspace self-attention, one query and one key at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def _weights(scores: Tensor, lse: Tensor, phi: str, threshold: float | None) -> Tensor:
    """phi of one query's scores: softmax (CRATE Eq. 11), h(softmax) (AoT Theorem 3.1), relu or identity."""
    if phi == "relu":
        return torch.stack([s if s > 0 else torch.zeros_like(s) for s in scores])
    if phi == "identity":
        return scores
    probs = torch.stack([(s - lse).exp() for s in scores])
    if phi == "softmax":
        return probs
    assert threshold is not None
    return torch.stack([torch.full_like(p, threshold if p > threshold else 0.0) for p in probs])


def mssa_loop(
    w: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    phi: str = "softmax",
    threshold: float | None = None,
    key_padding_mask: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend with one projection: ``out_i = sum_j phi(scale w_i . w_j) w_j`` (CRATE Eq. 11; AoT Theorem 3.1).

    ``lse_i = log sum_j exp(scale w_i . w_j)`` over the keys allowed; no key: out 0, lse -inf.
    """
    batch, nheads, seqlen, head_dim = w.shape
    factor = head_dim**-0.5 if scale is None else scale
    outs, lses = [], []
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(nheads) for i in range(seqlen)):
        keys = [j for j in range(seqlen) if key_padding_mask is None or key_padding_mask[b, j]]
        keys = [j for j in keys if j <= i or not causal]
        out, lse = w.new_zeros(head_dim), w.new_full((), -torch.inf)
        if keys:
            scores = torch.stack([factor * (w[b, h, i] @ w[b, h, j]) for j in keys])
            top = scores.max().detach()
            lse = top + torch.stack([(s - top).exp() for s in scores]).sum().log()
            for j, weight in zip(keys, _weights(scores, lse, phi, threshold), strict=True):
                if keep is None or keep[b, h, i, j]:
                    out = out + weight / (1 - dropout_p) * w[b, h, j]
        outs.append(out)
        lses.append(lse)
    stacked_lse = torch.stack(lses).view(batch, nheads, seqlen) if phi in ("softmax", "threshold") else None
    return torch.stack(outs).view(w.shape), stacked_lse
