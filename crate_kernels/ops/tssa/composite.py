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
    squares = w.to(_register.stat_dtype(w.dtype)).square()
    counted = squares if key_padding_mask is None else squares * key_padding_mask[:, None, :, None]
    energy = counted.sum(2).clamp_min_(_FULL_FLOOR)
    similarity = _channels_dot(squares, energy.reciprocal())
    membership = (temp.to(squares.dtype)[:, None] * similarity).softmax(1)
    counted = membership
    if key_padding_mask is not None:
        # All zero where no token is left, and with it the output and every gradient.
        membership = membership * key_padding_mask.any(1)[:, None, None]
        counted = membership * key_padding_mask[:, None, :]
    moment = _rows_dot(counted, squares) / (counted.sum(-1, keepdim=True) + _MASS_FLOOR)
    attention = (1 + moment).reciprocal()
    if seed is not None:
        attention *= _channel_factor(w, seed, dropout_p, attention.dtype)
    # In the layout of the output from here on: w^2 is done with.
    out = torch.mul(w, membership.unsqueeze(-1), out=squares).mul_(attention.neg_().unsqueeze(2))
    if where is not None:
        return where.pack(out).to(w.dtype), where.pack_rows(membership), energy, moment
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
        w, dout, membership = where.pad(w), where.pad(dout), where.pad_rows(membership)
        dmembership = None if dmembership is None else where.pad_rows(dmembership)
    squares = w.to(_register.stat_dtype(w.dtype)).square()
    similarity = _channels_dot(squares, energy.reciprocal())
    attention = (1 + moment).reciprocal()
    slope = attention.square()
    if seed is not None:
        factor = _channel_factor(w, seed, dropout_p, attention.dtype)
        attention, slope = attention * factor, slope * factor
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
    bracket = torch.mul(counted.unsqueeze(-1), dmoment.unsqueeze(2), out=squares)
    denergy = denergy.unsqueeze(2)
    bracket += denergy if key_padding_mask is None else denergy * key_padding_mask[:, None, :, None]
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


def _running_energy(w: Tensor, mask: Tensor | None, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return w^2 and its running sum over kept tokens, both (batch, nheads, seqlen, head_dim)."""
    squares = w.to(_register.stat_dtype(w.dtype)).square()
    energy = _scan(squares if mask is None else squares * mask[:, None, :, None])
    return squares, energy if start is None else energy.add_(start.unsqueeze(2))


def _running_moment(
    squares: Tensor, membership: Tensor, mask: Tensor | None, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the running sums of Pi w^2 and, (batch, nheads, seqlen), of Pi over kept tokens."""
    weights = membership if mask is None else membership * mask[:, None, :]
    weighted, mass = _scan(weights.unsqueeze(-1) * squares), weights.cumsum(2)
    if state is not None:
        weighted, mass = weighted.add_(state[0].unsqueeze(2)), mass + state[1].unsqueeze(-1)
    return weighted, mass


def _causal_similarity(ratio: Tensor, bias: Tensor | None) -> Tensor:
    """Return q from w^2 / c and the (batch or 1, nheads, seqlen) bias, which enters once a channel."""
    similarity = ratio.sum(-1)
    return similarity if bias is None else similarity + ratio.shape[-1] * bias.to(ratio.dtype)


def _causal_output(w: Tensor, membership: Tensor, weighted: Tensor, mass: Tensor, factor: Tensor | None) -> Tensor:
    """Return -w Pi / (1 + M), times the dropout factor, in the buffer of ``weighted``."""
    attention = weighted.div_((mass + _MASS_FLOOR).unsqueeze(-1)).add_(1).reciprocal_()
    if factor is not None:
        attention *= factor
    return attention.mul_(w).mul_(membership.neg().unsqueeze(-1))


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
    squares, energy = _running_energy(w, key_padding_mask, None)
    similarity = _causal_similarity(squares / energy.clamp_min_(_CAUSAL_FLOOR), bias)
    membership = (temp.to(similarity.dtype)[:, None] * similarity).softmax(1)
    if key_padding_mask is not None:
        # All zero before the first kept token, and with it the output and every gradient.
        membership = membership * (key_padding_mask.cumsum(1) > 0)[:, None, :]
    weighted, mass = _running_moment(squares, membership, key_padding_mask, None)
    factor = None if seed is None else _element_factor(w, seed, dropout_p, squares.dtype)
    out = _causal_output(w, membership, weighted, mass, factor)
    if where is not None:
        return where.pack(out).to(w.dtype), where.pack_rows(membership)
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
        w, dout, membership = where.pad(w), where.pad(dout), where.pad_rows(membership)
        dmembership = None if dmembership is None else where.pad_rows(dmembership)
    mask = None if key_padding_mask is None else key_padding_mask[:, None, :]
    squares, energy = _running_energy(w, key_padding_mask, None)
    floored = energy.clamp_min(_CAUSAL_FLOOR)
    similarity = _causal_similarity(squares / floored, None if denom_bias is None else denom_bias[None])
    weighted, mass = _running_moment(squares, membership, key_padding_mask, None)
    mass = (mass + _MASS_FLOOR).unsqueeze(-1)
    moment = weighted.div_(mass)
    attention = (1 + moment).reciprocal()
    slope = attention.square()
    if seed is not None:
        factor = _element_factor(w, seed, dropout_p, attention.dtype)
        attention, slope = attention.mul_(factor), slope.mul_(factor)
    grad = dout.to(squares.dtype)
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
    squares, energies = _running_energy(w, key_padding_mask, energy)
    similarity = _causal_similarity(squares / energies.clamp_min(_CAUSAL_FLOOR), bias)
    membership = (temp.to(similarity.dtype)[:, None] * similarity).softmax(1)
    if key_padding_mask is None:
        lengths += w.shape[2]
    else:
        held = lengths[:, None] + key_padding_mask.cumsum(1)
        membership = membership * (held > 0)[:, None, :]
        lengths.copy_(held[:, -1])
    sums, masses = _running_moment(squares, membership, key_padding_mask, (weighted, mass))
    energy.copy_(energies[:, :, -1])
    weighted.copy_(sums[:, :, -1])
    mass.copy_(masses[:, :, -1])
    out = _causal_output(w, membership, sums, masses, None)
    return _projection_layout(out, w.dtype), membership
