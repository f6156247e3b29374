"""Subspace self-attention as its equations have it: the oracle of every other backend.

For one head, with tokens as the rows of W (seqlen, head_dim)::

    S   = scale * W W^T
    P   = softmax(S)  over the allowed keys       (CRATE, Eq. 11-12: Q = K = V = W)
    lse = logsumexp(S) over the same keys
    O   = phi(P) W

Nothing is cast and PyTorch differentiates every step, so that in float64 the gradients of any
order are exact. A row with no allowed key gives 0 with zero gradient and lse = -inf. Its scores are
replaced by zeros before the softmax: softmax of an empty set is NaN, and NaN times a zero gradient
is NaN again.

One matrix serving three roles gives the backward, with delta_i = sum_d dO_id O_id::

    dP = dO W^T,   dS = P * (dP - delta + dlse)
    dW = P^T dO + scale * (dS + dS^T) W
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from crate_kernels._core import packing, philox
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall


def _allowed(w: Tensor, causal: bool, key_padding_mask: Tensor | None) -> Tensor | None:
    """Return the keys that each query may see, (batch or 1, 1, seqlen or 1, seqlen), or None for all."""
    allowed = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if causal:
        lower = torch.ones(w.shape[2], w.shape[2], dtype=torch.bool, device=w.device).tril()
        allowed = lower[None, None] if allowed is None else allowed & lower
    return allowed


def _attend(scores: Tensor, values: Tensor, allowed: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values and the logsumexp, over the allowed keys."""
    probs, lse, has_key = _softmax(scores, allowed)
    out = (probs if factor is None else probs * factor) @ values
    if has_key is not None:
        out = out.masked_fill(~has_key, 0.0)
    return out, lse


def _softmax(scores: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return probabilities, logsumexp and, where keys can be missing, the rows that have any."""
    if allowed is None:
        return scores.softmax(-1), scores.logsumexp(-1), None
    has_key = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(~has_key, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~has_key.squeeze(-1), -torch.inf)
    return scores.softmax(-1).masked_fill(~has_key, 0.0), lse, has_key


def forward(w: Tensor, call: MSSACall, plain: str | None = None) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; ``plain`` is "relu" or "identity" where they take the place of the softmax."""
    if call.cu_seqlens is None:
        return _dense(w, call, plain, 0)
    bounds = packing.bounds(call.cu_seqlens)
    if bounds is None:
        padded, layout = packing.pad(w, call.cu_seqlens, call.max_seqlen)
        out, lse = _dense(padded, call.batched(layout.mask), plain, 0)
        return layout.pack(out), layout.pack_rows(lse)
    outs, lses = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        out, lse = _dense(w[start:end].transpose(0, 1).unsqueeze(0), call, plain, index)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return packing.join(outs, bounds, len(w), 0), packing.join(lses, bounds, len(w), 1)


def _dense(w: Tensor, call: MSSACall, plain: str | None, first: int) -> tuple[Tensor, Tensor]:
    """Attend within each batch element; ``first`` is the index of the first, for dropout."""
    batch, nheads, seqlen, _ = w.shape
    factor = None
    if call.seed is not None:
        position = torch.arange(seqlen, device=w.device)
        heads = first * nheads + philox.head_counter(batch, nheads, w.device)
        factor = philox.keep_factor(call.seed, call.dropout_p, heads, position[:, None], position, w.dtype)
    scores = call.scale * (w @ w.transpose(-1, -2))
    allowed = _allowed(w, call.causal, call.key_padding_mask)
    if plain is not None:
        weights = scores.relu() if plain == "relu" else scores
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        lse = w.new_empty(batch, nheads, 0)  # there is no softmax
    elif call.threshold is not None:
        probs, lse, _ = _softmax(scores, allowed)
        weights = (probs > call.threshold).to(w.dtype) * call.threshold
    else:
        return _attend(scores, w, allowed, factor)
    return (weights if factor is None else weights * factor) @ w, lse


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append the kept tokens of ``w`` to the cache and attend, one sequence at a time."""
    outs, lses = [], []
    for b in range(w.shape[0]):
        start = int(lengths[b])
        keep = w.new_ones(w.shape[2], dtype=torch.bool) if call.key_padding_mask is None else call.key_padding_mask[b]
        new = w[b][:, keep][:, : data.shape[2] - start]
        end = start + new.shape[1]
        data[b, :, start:end] = new
        lengths[b] = end
        keys = data[b, :, :end]
        visible = start + keep.cumsum(0)  # (seqlen,): cached tokens, and new ones up to this one
        allowed = torch.arange(end, device=w.device) < visible[:, None]
        out, lse = _attend(call.scale * (w[b] @ keys.transpose(-1, -2)), keys, allowed[None], None)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
