"""Token statistics with few passes over w, and hand-written backwards that save almost nothing.

The full form saves w, Pi and two (nheads, head_dim) rows a batch element; the causal form w and Pi,
and repeats its scans in the backward. Statistics are fp32 (float64 for float64 w). Derivations
are in ``reference.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels import _packing, _philox, _register

_FULL_FLOOR, _CAUSAL_FLOOR, _MASS_FLOOR = 1e-24, 1e-12, 1e-8


def _rows_dot(weights: Tensor, tokens: Tensor) -> Tensor:
    """Return sum_n weights_hn tokens_hnd, (batch, nheads, head_dim)."""
    return (weights.unsqueeze(-2) @ tokens).squeeze(-2)


def _channels_dot(tokens: Tensor, row: Tensor) -> Tensor:
    """Return sum_d tokens_hnd row_hd, (batch, nheads, seqlen); a multiply and a sum beat a bmv."""
    return (tokens * row.unsqueeze(2)).sum(-1)


def _projection_layout(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, and lay out so that merging heads is a view."""
    return out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _channel_factor(w: Tensor, seed: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """Return the dropout factor of each channel, (batch, nheads, head_dim)."""
    batch, nheads, _, head_dim = w.shape
    heads = _philox.head_counter(batch, nheads, w.device)[..., 0]
    zero = torch.zeros((), dtype=torch.int64, device=w.device)
    channels = torch.arange(head_dim, device=w.device)
    return _philox.keep_factor(seed, dropout_p, heads, zero, channels, dtype)


def _statistics(w: Tensor, temp: Tensor, mask: Tensor | None, energy: Tensor | None) -> tuple[Tensor, ...]:
    """Return w^2, c, q and Pi of the full form, in the dtype of the statistics."""
    squares = w.to(_register.stat_dtype(w.dtype)).square()
    if energy is None:
        counted = squares if mask is None else squares * mask[:, None, :, None]
        energy = counted.sum(2).clamp_min_(_FULL_FLOOR)
    similarity = _channels_dot(squares, energy.reciprocal())
    membership = (temp.to(squares.dtype)[:, None] * similarity).softmax(1)
    return squares, energy, similarity, membership


def forward(
    w: Tensor,
    temp: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, membership, the column energies c and the second moments M."""
    where = None
    if cu_seqlens is not None:
        w, where = _packing.pad(w, cu_seqlens, max_seqlen)
        key_padding_mask = where.mask
    squares, energy, _, membership = _statistics(w, temp, key_padding_mask, None)
    counted = membership if key_padding_mask is None else membership * key_padding_mask[:, None, :]
    moment = _rows_dot(counted, squares) / (counted.sum(-1, keepdim=True) + _MASS_FLOOR)
    attention = (1 + moment).reciprocal()
    if seed is not None:
        attention *= _channel_factor(w, seed, dropout_p, attention.dtype)
    if key_padding_mask is not None:
        attention = attention * key_padding_mask.any(1)[:, None, None]
    # In the layout of the output from here on: w^2 is done with.
    out = torch.mul(w, membership.unsqueeze(-1), out=squares).mul_(attention.neg_().unsqueeze(2))
    if where is not None:
        return where.pack(out).to(w.dtype), where.pack(membership.unsqueeze(-1))[..., 0].t(), energy, moment
    return _projection_layout(out, w.dtype), membership, energy, moment


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    where, dtype = None, w.dtype
    if cu_seqlens is not None:
        where = _packing.layout(cu_seqlens, max_seqlen, w.shape[0])
        key_padding_mask = where.mask
        w, dout = where.pad(w), where.pad(dout)
        dmembership = None if dmembership is None else where.pad(dmembership.t().unsqueeze(-1))[..., 0]
    squares, energy, similarity, membership = _statistics(w, temp, key_padding_mask, energy)
    attention = (1 + moment).reciprocal()
    slope = attention.square()
    if seed is not None:
        factor = _channel_factor(w, seed, dropout_p, attention.dtype)
        attention, slope = attention * factor, slope * factor
    if key_padding_mask is not None:
        some = key_padding_mask.any(1)[:, None, None]
        attention, slope = attention * some, slope * some
    counted = membership if key_padding_mask is None else membership * key_padding_mask[:, None, :]
    mass = counted.sum(-1, keepdim=True) + _MASS_FLOOR
    grad = dout.to(squares.dtype)
    grad_w = grad * w
    dmoment = slope * _rows_dot(membership, grad_w) / mass
    dmass = -(dmoment * moment).sum(-1, keepdim=True)
    dmembers = _channels_dot(squares, dmoment) + dmass
    if key_padding_mask is not None:
        dmembers = dmembers * key_padding_mask[:, None, :]
    dmembers -= _channels_dot(grad_w, attention)
    if dmembership is not None:
        dmembers += dmembership
    dlogit = membership * (dmembers - (membership * dmembers).sum(1, keepdim=True))
    dtemp = (dlogit * similarity).sum((0, 2)).to(temp.dtype)
    dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
    # Twice by c, not once by c^2: that underflows for channels which c itself still holds.
    denergy = _rows_dot(dsimilarity, squares) / energy / energy
    denergy = torch.where(energy > _FULL_FLOOR, -denergy, 0.0)
    # w (2 Pi dM + 2 dq / c + 2 dc) as a rank-2 product a head, reusing the two big buffers.
    if key_padding_mask is None:
        bracket = torch.mul(counted.unsqueeze(-1), dmoment.unsqueeze(2), out=squares)
        bracket += denergy.unsqueeze(2)
    else:
        bracket = torch.mul(counted.unsqueeze(-1), dmoment.unsqueeze(2), out=squares)
        bracket += denergy.unsqueeze(2) * key_padding_mask[:, None, :, None]
    bracket.addcmul_(dsimilarity.unsqueeze(-1), energy.reciprocal().unsqueeze(2))
    dw = bracket.mul_(w).mul_(2)
    dw.sub_(torch.mul(grad, membership.unsqueeze(-1), out=grad_w).mul_(attention.unsqueeze(2)))
    if where is not None:
        return where.pack(dw).to(dtype), dtemp
    return _projection_layout(dw, dtype), dtemp


def _scan(x: Tensor, reverse: bool = False) -> Tensor:
    """Return the running (or suffix) sum over tokens of (batch, nheads, seqlen, ...), in x's layout.

    With heads inside tokens in memory, cumsum over the transposed view is five times faster.
    """
    if reverse:
        return _scan(x.flip(2)).flip(2)
    if x.stride(1) < x.stride(2):
        return x.transpose(1, 2).cumsum(1).transpose(1, 2)
    return x.cumsum(2)


def _causal_statistics(
    w: Tensor,
    temp: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, ...]:
    """Return w^2, cs, c, q, Pi, s and M of the causal form, continuing from ``state``.

    Args:
        w: (batch, nheads, seqlen, head_dim).
        temp: (nheads,).
        bias: (batch or 1, nheads, seqlen), the denominator bias of each token.
        mask: (batch, seqlen) bool, or None.
        state: running w^2, Pi w^2 (batch, nheads, head_dim) and Pi (batch, nheads) so far.
    """
    squares = w.to(_register.stat_dtype(w.dtype)).square()
    counted = squares if mask is None else squares * mask[:, None, :, None]
    energy = _scan(counted)
    if state is not None:
        energy += state[0].unsqueeze(2)
    floored = energy.clamp_min(_CAUSAL_FLOOR)
    similarity = (squares / floored).sum(-1)
    if bias is not None:
        similarity = similarity + w.shape[-1] * bias.to(similarity.dtype)
    membership = (temp.to(squares.dtype)[:, None] * similarity).softmax(1)
    weights = membership if mask is None else membership * mask[:, None, :]
    mass = weights.cumsum(2)
    weighted = _scan(weights.unsqueeze(-1) * squares)
    if state is not None:
        mass = mass + state[2].unsqueeze(-1)
        weighted += state[1].unsqueeze(2)
    return squares, energy, floored, similarity, membership, mass, weighted


def _element_factor(w: Tensor, seed: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """Return the dropout factor of each element, in w's shape."""
    batch, nheads, seqlen, head_dim = w.shape
    heads = _philox.head_counter(batch, nheads, w.device)
    rows = torch.arange(seqlen, device=w.device)[:, None]
    return _philox.keep_factor(seed, dropout_p, heads, rows, torch.arange(head_dim, device=w.device), dtype)


def forward_causal(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return out and membership of the causal form."""
    where = None
    if cu_seqlens is not None:
        w, where = _packing.pad(w, cu_seqlens, max_seqlen)
        key_padding_mask = where.mask
    bias = None if denom_bias is None else denom_bias[None]
    *_, membership, mass, weighted = _causal_statistics(w, temp, bias, key_padding_mask, None)
    attention = weighted.div_((mass + _MASS_FLOOR).unsqueeze(-1)).add_(1).reciprocal_()
    if seed is not None:
        attention *= _element_factor(w, seed, dropout_p, attention.dtype)
    if key_padding_mask is not None:
        attention *= (key_padding_mask.cumsum(1) > 0)[:, None, :, None]
    out = attention.mul_(w).mul_(membership.neg().unsqueeze(-1))
    if where is not None:
        return where.pack(out).to(w.dtype), where.pack(membership.unsqueeze(-1))[..., 0].t()
    return _projection_layout(out, w.dtype), membership


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias); the scans are repeated, not saved."""
    where, dtype = None, w.dtype
    if cu_seqlens is not None:
        where = _packing.layout(cu_seqlens, max_seqlen, w.shape[0])
        key_padding_mask = where.mask
        w, dout = where.pad(w), where.pad(dout)
        dmembership = None if dmembership is None else where.pad(dmembership.t().unsqueeze(-1))[..., 0]
    mask = None if key_padding_mask is None else key_padding_mask[:, None, :]
    bias = None if denom_bias is None else denom_bias[None]
    squares, energy, floored, similarity, membership, mass, weighted = _causal_statistics(
        w, temp, bias, key_padding_mask, None
    )
    mass = (mass + _MASS_FLOOR).unsqueeze(-1)
    moment = weighted.div_(mass)
    attention = (1 + moment).reciprocal()
    slope = attention.square()
    if seed is not None:
        factor = _element_factor(w, seed, dropout_p, attention.dtype)
        attention, slope = attention.mul_(factor), slope.mul_(factor)
    grad = dout.to(squares.dtype)
    if mask is not None:
        grad = grad * (mask.cumsum(2) > 0).unsqueeze(-1)
    grad_w = grad * w
    dmoment = slope.mul_(grad_w).mul_(membership.unsqueeze(-1)).div_(mass)
    dmass = _scan((dmoment * moment).sum(-1), reverse=True)
    dmoment = _scan(dmoment, reverse=True)
    if mask is not None:
        dmoment, dmass = dmoment * mask.unsqueeze(-1), dmass * mask
    dmembers = (dmoment * squares).sum(-1) - dmass - grad_w.mul_(attention).sum(-1)
    if dmembership is not None:
        dmembers += dmembership
    dlogit = membership * (dmembers - (membership * dmembers).sum(1, keepdim=True))
    dtemp = (dlogit * similarity).sum((0, 2)).to(temp.dtype)
    dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
    ddenom_bias = temp.new_empty(0)
    if denom_bias is not None:
        ddenom_bias = (w.shape[-1] * dsimilarity.sum(0)).to(denom_bias.dtype)
    per_energy = dsimilarity.unsqueeze(-1) / floored
    # As in the full form, by c twice: c^2 can underflow.
    denergy = torch.where(energy >= _CAUSAL_FLOOR, -(per_energy * squares).div_(floored), 0.0)
    denergy = _scan(denergy, reverse=True)
    if mask is not None:
        denergy = denergy * mask.unsqueeze(-1)
    dw = dmoment.mul_(membership.unsqueeze(-1)).add_(per_energy).add_(denergy).mul_(w).mul_(2)
    dw.sub_(attention.mul_(grad).mul_(membership.unsqueeze(-1)))
    if where is not None:
        return where.pack(dw).to(dtype), dtemp, ddenom_bias
    return _projection_layout(dw, dtype), dtemp, ddenom_bias


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    energy: Tensor,
    weighted: Tensor,
    mass: Tensor,
    lengths: Tensor,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place."""
    bias = None
    if denom_bias is not None:
        position = lengths[:, None] + torch.arange(w.shape[2], device=w.device)
        # Past the end only for padded tokens, which nobody reads.
        bias = denom_bias[:, position.clamp(max=denom_bias.shape[1] - 1).long()].transpose(0, 1)
    state = (energy, weighted, mass)
    _, energies, _, _, membership, masses, sums = _causal_statistics(w, temp, bias, key_padding_mask, state)
    energy.copy_(energies[:, :, -1])
    weighted.copy_(sums[:, :, -1])
    mass.copy_(masses[:, :, -1])
    attention = sums.div_((masses + _MASS_FLOOR).unsqueeze(-1)).add_(1).reciprocal_()
    out = attention.mul_(w).mul_(membership.neg().unsqueeze(-1))
    if key_padding_mask is None:
        lengths += w.shape[2]
    else:
        held = lengths[:, None] + key_padding_mask.cumsum(1)
        out *= (held > 0)[:, None, :, None]
        lengths.copy_(held[:, -1])
    return _projection_layout(out, w.dtype), membership
