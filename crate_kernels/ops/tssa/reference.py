"""Token-statistics self-attention as its equations have it: the oracle of every other backend.

docs/tssa.md has them. Padded tokens leave the sums and still get an output; where no token is left, output and
membership are 0. Nothing is cast. A floor below the dtype's smallest normal number becomes that number: in float16 an
all-zero channel would be 0 / 0, and over a subnormal floor its gradient, infinity times zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._core import packing
from crate_kernels.ops.tssa.call import State, TSSACall


def _floor(value: float, dtype: torch.dtype) -> float:
    """Return ``value``, or the dtype's smallest normal number where that is larger."""
    return max(value, torch.finfo(dtype).smallest_normal)


def _unpadded(key_padding_mask: Tensor | None, has_key: Tensor | None) -> Tensor | float:
    """Return the 0/1 factor of each token in the sums; all ones where every token is padded.

    Such rows are cleared at the end; until then they must stay free of 0 / 0, whose NaN would
    survive a zero gradient.
    """
    if key_padding_mask is None or has_key is None:
        return 1.0
    return (key_padding_mask | ~has_key)[:, None, :, None]


def _clear(out: Tensor, membership: Tensor, has_key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Clear what has no token to sum over."""
    if has_key is None:
        return out, membership
    return out.masked_fill(~has_key[:, None, :, None], 0.0), membership.masked_fill(~has_key[:, None], 0.0)


def full(w: Tensor, temp: Tensor, key_padding_mask: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``out`` and the membership Pi (batch, nheads, seqlen) of a padded batch."""
    has_key = None if key_padding_mask is None else key_padding_mask.any(1, keepdim=True)
    counted = _unpadded(key_padding_mask, has_key)
    squares = w.square()
    energy = (squares * counted).sum(2, keepdim=True).clamp_min(_floor(1e-24, w.dtype))
    membership = (temp[:, None] * (squares / energy).sum(-1)).softmax(1)
    weights = membership.unsqueeze(-1) * counted  # (batch, nheads, seqlen, 1)
    moment = (weights * squares).sum(2, keepdim=True) / (weights.sum(2, keepdim=True) + 1e-8)
    attention = 1 / (1 + moment)
    if factor is not None:
        attention = attention * factor
    return _clear(-w * membership.unsqueeze(-1) * attention, membership, has_key)


def causal(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and the membership of the causal form; denom_bias is (nheads, seqlen)."""
    has_key = None if key_padding_mask is None else key_padding_mask.cumsum(1) > 0
    counted = 1.0 if key_padding_mask is None else key_padding_mask[:, None, :, None]
    squares = w.square()
    energy = (squares * counted).cumsum(2).clamp_min(_floor(1e-12, w.dtype))
    if has_key is not None:
        # Cleared at the end; over the floor a padded token is beyond float16, and infinity stays in running sums.
        energy = energy.masked_fill(~has_key[:, None, :, None], 1.0)
    ratio = squares / energy
    if denom_bias is not None:
        ratio = ratio + denom_bias.unsqueeze(-1)
    membership = (temp[:, None] * ratio.sum(-1)).softmax(1)
    weights = membership.unsqueeze(-1) * counted
    moment = (weights * squares).cumsum(2) / (weights.cumsum(2) + _floor(1e-8, w.dtype))
    attention = 1 / (1 + moment)
    if factor is not None:
        attention = attention * factor
    return _clear(-w * membership.unsqueeze(-1) * attention, membership, has_key)


def forward(w: Tensor, temp: Tensor, call: TSSACall) -> tuple[Tensor, Tensor]:
    """Return ``out`` and membership of the full form, of a padded batch or of packed sequences."""

    def dense(w: Tensor, first: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return full(w, temp, mask, call.dropout_factor(w, 1, w.dtype, first))

    return _each_sequence(dense, w, call)


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall) -> tuple[Tensor, Tensor]:
    """Return ``out`` and membership of the causal form, of a padded batch or of packed sequences."""

    def dense(w: Tensor, first: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = None if denom_bias is None else denom_bias[:, : w.shape[2]]
        return causal(w, temp, bias, mask, call.dropout_factor(w, w.shape[2], w.dtype, first))

    return _each_sequence(dense, w, call)


def _each_sequence(dense: Callable, w: Tensor, call: TSSACall) -> tuple[Tensor, Tensor]:
    """Return what ``dense(w, number of its first sequence, mask)`` does of a padded batch, or sequence by sequence."""
    if call.cu_seqlens is None:
        return dense(w, 0, call.key_padding_mask)
    bounds = packing.bounds(call.cu_seqlens)
    if bounds is None:
        padded, layout = packing.pad(w, call.cu_seqlens, call.max_seqlen)
        out, membership = dense(padded, 0, layout.mask)
        return layout.pack(out), layout.pack_rows(membership)
    parts = [
        dense(w[start:end].transpose(0, 1)[None], index, None)
        for index, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    out = packing.join([out[0].transpose(0, 1) for out, _ in parts], bounds, len(w), 0)
    return out, packing.join([membership[0] for _, membership in parts], bounds, len(w), 1)


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    state: State,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums token by token; they are changed in place."""
    energy, weighted, mass, lengths = state
    outs, memberships = [], []
    for n in range(w.shape[2]):
        token = w[:, :, n]  # (batch, nheads, head_dim)
        keep = w.new_ones(w.shape[0]) if key_padding_mask is None else key_padding_mask[:, n].to(w.dtype)
        counted = keep[:, None, None]
        energy += token.square() * counted
        ratio = token.square() / energy.clamp_min(1e-12)
        if denom_bias is not None:
            position = (lengths + n).clamp(max=denom_bias.shape[1] - 1).long()
            ratio = ratio + denom_bias[:, position].t().unsqueeze(-1)
        membership = (temp * ratio.sum(-1)).softmax(1)
        weighted += membership.unsqueeze(-1) * token.square() * counted
        mass += membership * counted[..., 0]
        moment = weighted / (mass + 1e-8).unsqueeze(-1)
        out = -token * membership.unsqueeze(-1) / (1 + moment)
        seen = lengths + (n + 1 if key_padding_mask is None else key_padding_mask[:, : n + 1].sum(1)) > 0
        outs.append(out.masked_fill(~seen[:, None, None], 0.0))
        memberships.append(membership.masked_fill(~seen[:, None], 0.0))
    lengths += w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1).to(lengths.dtype)
    return torch.stack(outs, 2).to(w.dtype), torch.stack(memberships, 2)
