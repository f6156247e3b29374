"""Token statistics with few passes over w, and hand-written backwards that save almost nothing.

The full form saves w, Pi and two (nheads, head_dim) rows per sequence; the causal form w and Pi, and repeats its scans
in the backward. Statistics are fp32 (float64 for float64 w). Gradients: docs/derivations.md. Packed sequences are
padded first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator, packing
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import Saved, State, TSSACall
from crate_kernels.ops.tssa.products import causal_similarity, rows_dot
from crate_kernels.ops.tssa.sums import saved_sums

_FULL_FLOOR, _CAUSAL_FLOOR, _MASS_FLOOR = 1e-24, 1e-12, 1e-8


def _channels_dot(tokens: Tensor, row: Tensor) -> Tensor:
    """Return sum_d tokens_hnd row_hd, (batch, nheads, seqlen); a multiply and a sum beat a bmv."""
    return (tokens * row.unsqueeze(2)).sum(-1)


def _softmax_backward(membership: Tensor, dmembers: Tensor) -> Tensor:
    """Return the gradient of the logits; overwrites ``dmembers``. The mean is taken away twice: docs/numerics.md."""
    for _ in range(2):
        dmembers -= (membership * dmembers).sum(1, keepdim=True)
    return membership * dmembers


def _layout(w: Tensor, call: TSSACall) -> tuple[packing.PackedLayout, TSSACall]:
    """Return where packed sequences are in a padded batch, and the call on that."""
    assert call.cu_seqlens is not None
    where = packing.layout(call.cu_seqlens, call.max_seqlen, w.shape[0])
    return where, call.batched(where.mask)


def forward(w: Tensor, temp: Tensor, call: TSSACall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, membership, the column energies c and the second moments M."""
    op_checks.forward(w, temp, call)
    if call.packed:
        where, batched = _layout(w, call)
        out, membership, energy, moment = forward(where.pad(w), temp, batched)
        return where.pack(out), where.pack_rows(membership), energy, moment
    key_padding_mask = call.key_padding_mask
    squares = w.to(operator.stat_dtype(w.dtype)).square()
    counted = squares if key_padding_mask is None else squares * key_padding_mask[:, None, :, None]
    energy = counted.sum(2).clamp_min_(_FULL_FLOOR)
    # A division, as eager form has: where one token has all of c it is exactly 1.
    similarity = (squares / energy.unsqueeze(2)).sum(-1)
    membership = (temp.to(squares.dtype)[:, None] * similarity).softmax(1)
    counted = membership
    if key_padding_mask is not None:
        # All zero where no token is left, and with it the output and every gradient; NaN times 0 would be NaN.
        membership = membership.masked_fill(~key_padding_mask.any(1)[:, None, None], 0.0)
        counted = membership.masked_fill(~key_padding_mask[:, None, :], 0.0)
    moment = rows_dot(counted, squares) / (counted.sum(-1, keepdim=True) + _MASS_FLOOR)
    attention = (1 + moment).reciprocal()
    factor = call.dropout_factor(w, 1, attention.dtype)
    if factor is not None:
        attention *= factor.squeeze(2)
    # In the layout of the output from here on: w^2 is done with.
    out = torch.mul(w, membership.unsqueeze(-1), out=squares).mul_(attention.neg_().unsqueeze(2))
    return operator.merged_layout(out.to(w.dtype)), membership, energy, moment


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    op_checks.backward(dout, dmembership, w, temp, membership, energy, moment, call)
    if call.packed:
        where, batched = _layout(w, call)
        dmembership = None if dmembership is None else where.pad_rows(dmembership)
        saved = where.pad(w), temp, where.pad_rows(membership), energy, moment
        dw, dtemp = backward(where.pad(dout), dmembership, *saved, batched)
        return where.pack(dw), dtemp
    key_padding_mask = call.key_padding_mask
    squares = w.to(operator.stat_dtype(w.dtype)).square()
    attention = (1 + moment).reciprocal()
    slope = attention.square()
    factor = call.dropout_factor(w, 1, attention.dtype)
    if factor is not None:
        attention, slope = attention * factor.squeeze(2), slope * factor.squeeze(2)
    counted = membership if key_padding_mask is None else membership * key_padding_mask[:, None, :]
    mass = counted.sum(-1, keepdim=True) + _MASS_FLOOR
    grad = dout.to(squares.dtype)
    grad_w = grad * w
    dmoment = slope * rows_dot(membership, grad_w) / mass
    dmass = -(dmoment * moment).sum(-1, keepdim=True)
    dmembers = _channels_dot(squares, dmoment) + dmass
    if key_padding_mask is not None:
        dmembers = dmembers * key_padding_mask[:, None, :]
    dmembers -= _channels_dot(grad_w, attention)
    if dmembership is not None:
        dmembers += dmembership
    dlogit = _softmax_backward(membership, dmembers)
    # The ratio comes first: where one token has all of c it is exactly 1, as in eager form, and w^2 times a small
    # gradient would underflow for channels which c itself still holds.
    ratio = squares.div_(energy.unsqueeze(2))
    dtemp = (dlogit * ratio.sum(-1)).sum((0, 2)).to(temp.dtype)
    dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
    mean = rows_dot(dsimilarity, ratio)  # dq less this is what w gets
    mean = torch.where(energy > _FULL_FLOOR, mean, 0.0).unsqueeze(2)
    # w (2 Pi dM + 2 (dq - mean) / c), reusing the two big buffers.
    kept = mean if key_padding_mask is None else mean * key_padding_mask[:, None, :, None]
    bracket = torch.sub(dsimilarity.unsqueeze(-1), kept, out=squares)
    bracket.mul_(energy.reciprocal().unsqueeze(2)).addcmul_(counted.unsqueeze(-1), dmoment.unsqueeze(2))
    dw = bracket.mul_(w).mul_(2)
    dw.sub_(torch.mul(grad, membership.unsqueeze(-1), out=grad_w).mul_(attention.unsqueeze(2)))
    return operator.merged_layout(dw.to(w.dtype)), dtemp


def _scan_(x: Tensor, reverse: bool = False) -> Tensor:
    """Turn (batch, nheads, seqlen, ...) into its running (or suffix) sum over tokens, in place.

    On the CPU cumsum walks one lane at a time: adding whole rows within chunks of 16 tokens, then what came
    before each chunk, took 0.6 ms where cumsum took 1.5 to 25 (1 to 4 Mi elements, two cores).
    """
    if x.device.type != "cpu":
        return x.copy_(x.flip(2).cumsum(2).flip(2) if reverse else x.cumsum(2))
    seqlen = x.shape[2]
    chunk = min(16, seqlen)
    for n in range(1, chunk):
        here, there = (chunk - 1 - n, chunk - n) if reverse else (n, n - 1)
        target, source = x[:, :, here::chunk], x[:, :, there::chunk]
        both = min(target.shape[2], source.shape[2])
        target[:, :, :both].add_(source[:, :, :both])
    before = -(-seqlen // max(chunk, 1)) - 1  # chunks that something is added to: all but the first (or the last)
    if before > 0 and reverse:
        carry = x[:, :, ::chunk][:, :, 1:].flip(2).cumsum(2).flip(2)
        x[:, :, : before * chunk].unflatten(2, (before, chunk)).add_(carry.unsqueeze(3))
    elif before > 0:
        carry = x[:, :, chunk - 1 :: chunk][:, :, :before].cumsum(2)
        whole = seqlen // chunk - 1
        x[:, :, chunk : chunk + whole * chunk].unflatten(2, (whole, chunk)).add_(carry[:, :, :whole].unsqueeze(3))
        x[:, :, chunk + whole * chunk :].add_(carry[:, :, whole:])
    return x


def _continue(start: Tensor, running: Tensor) -> None:
    """Add a cache's sums ``start`` to running sums, and these to ``start``, which may have more digits."""
    before = start.to(running.dtype, copy=True)
    start += running[:, :, -1]
    running += before.unsqueeze(2)


def _running_energy(w: Tensor, mask: Tensor | None, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return w^2 and its running sum over kept tokens: c, before the floor."""
    squares = w.to(operator.stat_dtype(w.dtype)).square()
    energy = _scan_(squares.clone() if mask is None else squares * mask[:, None, :, None])
    if start is not None:
        _continue(start, energy)
    return squares, energy


def _running_moment(squares: Tensor, membership: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the running sums of Pi w^2 and, (batch, nheads, seqlen), of Pi over kept tokens."""
    weights = membership if mask is None else membership * mask[:, None, :]
    return _scan_(weights.unsqueeze(-1) * squares), weights.cumsum(2)


def _run_causal(
    w: Tensor, temp: Tensor, bias: Tensor | None, call: TSSACall, state: State | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and membership of a padded batch, whose sums start from ``state`` and are left there."""
    energy, weighted, mass, lengths = state or (None, None, None, None)
    mask = call.key_padding_mask
    squares, energies = _running_energy(w, mask, energy)
    energies.clamp_min_(_CAUSAL_FLOOR)
    similarity = causal_similarity(torch.div(squares, energies, out=energies), bias)
    membership = (temp.to(similarity.dtype)[:, None] * similarity).softmax(1)
    if mask is not None:
        # All zero before the first kept token, and with it the output and every gradient.
        seen = mask.cumsum(1) if lengths is None else lengths[:, None] + mask.cumsum(1)  # kept tokens so far
        membership = membership.masked_fill((seen == 0)[:, None, :], 0.0)
    sums, masses = _running_moment(squares, membership, mask)
    if weighted is not None and mass is not None:
        _continue(weighted, sums)
        _continue(mass, masses)
    attention = sums.div_((masses + _MASS_FLOOR).unsqueeze(-1)).add_(1).reciprocal_()
    factor = call.dropout_factor(w, w.shape[2], squares.dtype)
    if factor is not None:
        attention *= factor
    out = attention.mul_(w).mul_(membership.neg().unsqueeze(-1))
    return operator.merged_layout(out.to(w.dtype)), membership


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall) -> tuple[Tensor, Tensor, Tensor]:
    """Return out and membership of the causal form, and the sums that ``call`` asks for."""
    op_checks.forward_causal(w, temp, denom_bias, call)
    if call.packed:
        where, batched = _layout(w, call)
        out, membership, sums = forward_causal(where.pad(w), temp, denom_bias, batched)
        return where.pack(out), where.pack_rows(membership), sums
    out, membership = _run_causal(w, temp, None if denom_bias is None else denom_bias[None], call)
    return out, membership, saved_sums(w, membership, call)


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    sums: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias); the scans are repeated, whatever sums were saved."""
    op_checks.backward_causal(dout, dmembership, w, temp, denom_bias, membership, call)
    op_checks.saved_sums(sums, w, call)
    if not call.packed:
        return _run_causal_backward(dout, dmembership, Saved(w, temp, denom_bias, membership), call)
    where, batched = _layout(w, call)
    dmembership = None if dmembership is None else where.pad_rows(dmembership)
    saved = Saved(where.pad(w), temp, denom_bias, where.pad_rows(membership))
    dw, dtemp, ddenom_bias = _run_causal_backward(where.pad(dout), dmembership, saved, batched, where.mask)
    return where.pack(dw), dtemp, ddenom_bias


def _run_causal_backward(
    dout: Tensor, dmembership: Tensor | None, saved: Saved, call: TSSACall, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a padded batch.

    ``real``, (batch, seqlen), marks the tokens of packed sequences; None: all are.
    """
    w, temp, denom_bias, membership, *_ = saved
    key_padding_mask = call.key_padding_mask
    mask = None if key_padding_mask is None else key_padding_mask[:, None, :]
    squares, energy = _running_energy(w, key_padding_mask, None)
    earlier = energy.roll(1, 2)
    earlier[:, :, :1] = 0
    ratio = squares / energy.clamp_min_(_CAUSAL_FLOOR)
    similarity = causal_similarity(ratio, None if denom_bias is None else denom_bias[None])
    moment, mass = _running_moment(squares, membership, key_padding_mask)
    mass = (mass + _MASS_FLOOR).unsqueeze(-1)
    moment.div_(mass)
    attention = (1 + moment).reciprocal_()
    grad = dout.to(squares.dtype)
    grad_w = grad * w
    dmoment = attention.square()
    factor = call.dropout_factor(w, w.shape[2], attention.dtype)
    if factor is not None:
        attention *= factor
        dmoment *= factor
    dmoment.mul_(grad_w).mul_(membership.unsqueeze(-1) / mass)
    dmass = moment.mul_(dmoment).sum(-1)
    dmass, dmoment = dmass.flip(2).cumsum(2).flip(2), _scan_(dmoment, reverse=True)
    if mask is not None:
        dmoment, dmass = dmoment * mask.unsqueeze(-1), dmass * mask
    dmembers = squares.mul_(dmoment).sum(-1) - dmass - grad_w.mul_(attention).sum(-1)
    if dmembership is not None:
        dmembers += dmembership
    dlogit = _softmax_backward(membership, dmembers)
    if real is not None:
        # Behind a sequence's end, its tokens and the bias may have made something that is no number.
        dlogit, similarity = (x.masked_fill(~real[:, None, :], 0.0) for x in (dlogit, similarity))
    dtemp = (dlogit * similarity).sum((0, 2)).to(temp.dtype)
    dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
    ddenom_bias = temp.new_empty(0)
    if denom_bias is not None:
        ddenom_bias = (w.shape[-1] * dsimilarity.sum(0)).to(denom_bias.dtype)
    per_energy = dsimilarity.unsqueeze(-1) / energy
    above = energy > _CAUSAL_FLOOR
    denergy = _scan_(torch.where(above, ratio.mul_(per_energy).neg_(), 0.0), reverse=True)
    later = denergy.roll(-1, 2)
    later[:, :, -1:] = 0
    if mask is not None:
        later *= mask.unsqueeze(-1)
    # A token's own part, 1 / c - w^2 / c^2, is the sum before it over c^2: a difference would cancel.
    per_energy *= torch.where(above, earlier.div_(energy), 1.0)
    dw = dmoment.mul_(membership.unsqueeze(-1)).add_(per_energy).add_(later).mul_(w).mul_(2)
    dw.sub_(attention.mul_(grad).mul_(membership.unsqueeze(-1)))
    return operator.merged_layout(dw.to(w.dtype)), dtemp, ddenom_bias


def _step(w: Tensor, temp: Tensor, bias: Tensor | None, mask: Tensor | None, state: State) -> tuple[Tensor, Tensor]:
    """Do what ``_run_causal`` does of one token, (batch, nheads, head_dim), in half as many operations.

    Sums are the cache's own, in its dtype; ``bias`` is (batch, nheads), ``mask`` (batch, 1).
    """
    energy, weighted, mass, lengths = state
    squares = w.to(operator.stat_dtype(w.dtype)).square()
    energy += squares if mask is None else squares * mask.unsqueeze(-1)
    similarity = (squares / energy.to(squares.dtype).clamp_min(_CAUSAL_FLOOR)).sum(-1)
    if bias is not None:
        similarity.add_(bias, alpha=w.shape[-1])
    membership = (temp.to(squares.dtype) * similarity).softmax(1)
    counted = membership
    if mask is not None:
        # Zero before the first kept token, and with it the output.
        membership = membership.masked_fill(lengths[:, None] + mask == 0, 0.0)
        counted = membership * mask
    weighted += squares.mul_(counted.unsqueeze(-1))
    mass += counted
    total = (mass + _MASS_FLOOR).to(squares.dtype)
    # A = 1 / (1 + M) without the division of M.
    out = w * (membership * total).neg_().unsqueeze(-1)
    out /= weighted.to(squares.dtype) + total.unsqueeze(-1)
    return out.to(w.dtype), membership


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    state: State,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place."""
    op_checks.decode(w, temp, denom_bias, state, key_padding_mask)
    bias = None
    if w.shape[2] == 1:
        if denom_bias is not None:
            position = state.lengths.clamp(min=0, max=denom_bias.shape[1] - 1)
            bias = denom_bias.index_select(1, position).t()
        out, membership = (x.unsqueeze(2) for x in _step(w.squeeze(2), temp, bias, key_padding_mask, state))
        state.lengths.add_(1 if key_padding_mask is None else key_padding_mask[:, 0])
        return operator.merged_layout(out), membership
    if denom_bias is not None:
        position = state.lengths[:, None] + torch.arange(w.shape[2], device=w.device)
        # Never past the end through the public function; on a GPU an index error would end the process.
        bias = denom_bias[:, position.clamp(min=0, max=denom_bias.shape[1] - 1).long()].transpose(0, 1)
    out, membership = _run_causal(w, temp, bias, TSSACall(key_padding_mask), state)
    state.advance(w, key_padding_mask)
    return out, membership
