"""Token statistics of a sequence over several processes, both forms: only sums over tokens are sent.

The full form adds up c, then M and its mass, over all ranks; the causal form adds up those of the ranks before. The
messages have batch * nheads * (head_dim or head_dim + 1) numbers, forward and backward, whatever the length.
docs/derivations.md has the gradients. Statistics are fp32 (float64 for float64 w). A rank's gradient of ``temp`` is its
part of the sum over ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import autograd, operator, philox
from crate_kernels._core import op_checks as tensors
from crate_kernels.distributed.collectives import Ranks, without_autocast
from crate_kernels.ops.tssa import call as whole
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.products import causal_similarity, rows_dot

_FULL_FLOOR, _CAUSAL_FLOOR, _MASS_FLOOR = 1e-24, 1e-12, 1e-8


class StatsCall(NamedTuple):
    """Options of a call.

    Attributes:
        ranks: the processes.
        key_padding_mask: (batch, own) bool of this rank's tokens, True = keep; None keeps all.
        seed: int64 scalar that dropout draws from, the same in all ranks; None without dropout.
        dropout_p: probability with which 1 / (1 + M) is dropped.
        start: place of this rank's first token in the sequence.
    """

    ranks: Ranks
    key_padding_mask: Tensor | None
    seed: Tensor | None
    dropout_p: float
    start: int

    def whole(self) -> whole.TSSACall:
        """Return the options as a call of one process has them."""
        return whole.TSSACall(self.key_padding_mask, seed=self.seed, dropout_p=self.dropout_p)

    def counted(self, x: Tensor) -> Tensor:
        """Return (batch, nheads, own, ...) with zeros at padded tokens."""
        mask = self.key_padding_mask
        return x if mask is None else x * mask.view(mask.shape[0], 1, -1, *[1] * (x.dim() - 3))

    def kept(self, dtype: torch.dtype) -> list[Tensor]:
        """Return [the number of kept tokens per sequence, (batch,)], or [] without a mask."""
        return [] if self.key_padding_mask is None else [self.key_padding_mask.sum(1).to(dtype)]

    def factor(self, w: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the dropout factor of these rows and all channels of w; None without dropout."""
        if self.seed is None:
            return None
        batch, nheads, _, head_dim = w.shape
        heads, channels = philox.head_counter(batch, nheads, w.device), torch.arange(head_dim, device=w.device)
        return philox.keep_factor(self.seed, self.dropout_p, heads, rows[:, None], channels, dtype)


def _squares(w: Tensor) -> Tensor:
    return w.to(operator.stat_dtype(w.dtype)).square()


def _check_sums(w: Tensor, by_channel: dict[str, Tensor], mass: Tensor) -> None:
    """Check what a backward is handed back of the sums over ranks: a hook may have changed any of it."""
    batch, nheads, _, head_dim = w.shape
    dtype = operator.stat_dtype(w.dtype)
    for name, value in by_channel.items():
        tensors.tensor("tssa backward", name, value, dtype, (batch, nheads, head_dim), w.device)
    tensors.tensor("tssa backward", "mass", mass, dtype, (batch, nheads), w.device)


def _through_softmax(dmembers: Tensor, membership: Tensor) -> Tensor:
    """Return the gradient of the logits from that of the softmax over heads; subtracted twice, it sums to zero."""
    for _ in range(2):
        dmembers = dmembers - (membership * dmembers).sum(1, keepdim=True)
    return membership * dmembers


class Full(torch.autograd.Function):
    """(out, membership) of the full form, differentiable once with respect to w and temp."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, w: Tensor, temp: Tensor, call: StatsCall) -> tuple[Tensor, Tensor]:
        """Return out (batch, nheads, own, head_dim) and membership (batch, nheads, own)."""
        squares = _squares(w)
        energy, *kept = call.ranks.sum(call.counted(squares).sum(2), *call.kept(squares.dtype))
        energy.clamp_min_(_FULL_FLOOR)
        similarity = (squares / energy.unsqueeze(2)).sum(-1)
        membership = (temp.to(squares.dtype)[:, None] * similarity).softmax(1)
        for count in kept:  # all zero where no rank has a token, and with it the output and every gradient
            membership = membership * (count > 0)[:, None, None]
        counted = call.counted(membership)
        moment, mass = call.ranks.sum(rows_dot(counted, squares), counted.sum(-1))
        moment /= mass.add_(_MASS_FLOOR).unsqueeze(-1)
        ctx.save_for_backward(w, temp, membership, energy, moment, mass)
        ctx.call = call
        attention, _ = Full.attention(w, moment, call)
        out = -w * (membership.unsqueeze(-1) * attention.unsqueeze(2))
        return operator.merged_layout(out.to(w.dtype)), membership

    @staticmethod
    def attention(w: Tensor, moment: Tensor, call: StatsCall) -> tuple[Tensor, Tensor]:
        """Return 1 / (1 + M) and minus its derivative, both after dropout, (batch, nheads, head_dim)."""
        attention = (1 + moment).reciprocal()
        factor = call.factor(w, torch.zeros(1, dtype=torch.int64, device=w.device), moment.dtype)
        if factor is None:
            return attention, attention.square()
        return attention * factor.squeeze(2), attention.square() * factor.squeeze(2)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dout: Tensor, dmembership: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return dw and this rank's part of dtemp."""
        w, temp, membership, energy, moment, mass = autograd.saved_tensors("tssa", ctx)
        call: StatsCall = ctx.call
        op_checks.backward(dout, dmembership, w, temp, membership, energy, moment, call.whole())
        _check_sums(w, {}, mass)
        squares = _squares(w)
        attention, slope = Full.attention(w, moment, call)
        grad_w = dout * w.to(squares.dtype)
        (total,) = call.ranks.sum(rows_dot(membership, grad_w))
        dmoment = slope * total / mass.unsqueeze(-1)
        dmass = -(dmoment * moment).sum(-1)
        dmembers = call.counted((squares * dmoment.unsqueeze(2)).sum(-1) + dmass.unsqueeze(2))
        dmembers = dmembers - (grad_w * attention.unsqueeze(2)).sum(-1) + dmembership
        dlogit = _through_softmax(dmembers, membership)
        similarity = (squares / energy.unsqueeze(2)).sum(-1)
        dtemp = (dlogit * similarity).sum((0, 2)).to(temp.dtype)
        dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
        # In the head's own scale: w^2 times a small gradient, and c^2, underflow where c itself does not.
        scale = energy.sum(-1, keepdim=True).clamp_max(1e37)
        (denergy,) = call.ranks.sum(rows_dot(dsimilarity / scale, squares))
        denergy = torch.where(energy > _FULL_FLOOR, -(denergy / energy * scale / energy), 0.0)
        through_sums = membership.unsqueeze(-1) * dmoment.unsqueeze(2) + denergy.unsqueeze(2)
        dw = 2 * w * (call.counted(through_sums) + dsimilarity.unsqueeze(-1) / energy.unsqueeze(2))
        dw -= dout * (membership.unsqueeze(-1) * attention.unsqueeze(2))
        sources = (dout, dmembership, w, temp)
        grads = operator.merged_layout(dw.to(w.dtype)), dtemp
        return *(autograd.once_differentiable("tssa", grad, *sources) for grad in grads), None


def _suffix(x: Tensor, after: Tensor) -> Tensor:
    """Return the sums over each token and those after it, of which ``after`` has those of later ranks."""
    return x.flip(2).cumsum(2).flip(2) + after.unsqueeze(2)


class Causal(torch.autograd.Function):
    """(out, membership) of the causal form, differentiable once with respect to w, temp and the tokens' biases."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, w: Tensor, temp: Tensor, bias: Tensor | None, call: StatsCall) -> tuple[Tensor, Tensor]:
        """Return out and membership; ``bias`` is (nheads, own)."""
        squares = _squares(w)
        counted = call.counted(squares)
        energy, *kept = call.ranks.before(counted.sum(2), *call.kept(squares.dtype))
        ratio = squares / Causal.energies(counted, energy)
        membership = (temp.to(squares.dtype)[:, None] * causal_similarity(ratio, bias)).softmax(1)
        for count in kept:  # all zero before the first kept token, and with it the output and every gradient
            assert call.key_padding_mask is not None
            num_seen = count[:, None] + call.key_padding_mask.cumsum(1)
            membership = membership * (num_seen > 0)[:, None, :]
        weights = call.counted(membership)
        sums = call.ranks.before(rows_dot(weights, squares), weights.sum(2))
        ctx.save_for_backward(w, temp, bias, membership, energy, *sums)
        ctx.call = call
        moment, _ = Causal.moments(squares, weights, *sums)
        attention, _ = Causal.attention(w, moment, call)
        out = -w * (membership.unsqueeze(-1) * attention)
        return operator.merged_layout(out.to(w.dtype)), membership

    @staticmethod
    def energies(counted: Tensor, before: Tensor) -> Tensor:
        """Return c of each token, from that of the ranks before."""
        return (counted.cumsum(2) + before.unsqueeze(2)).clamp_min_(_CAUSAL_FLOOR)

    @staticmethod
    def moments(squares: Tensor, weights: Tensor, weighted: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Return M of each token and channel, and its denominator (batch, nheads, own, 1)."""
        total = (weights.cumsum(2) + mass.unsqueeze(2) + _MASS_FLOOR).unsqueeze(-1)
        return ((weights.unsqueeze(-1) * squares).cumsum(2) + weighted.unsqueeze(2)) / total, total

    @staticmethod
    def attention(w: Tensor, moment: Tensor, call: StatsCall) -> tuple[Tensor, Tensor]:
        """Return 1 / (1 + M) and minus its derivative, both after dropout, in w's shape."""
        attention = (1 + moment).reciprocal()
        factor = call.factor(w, call.start + torch.arange(w.shape[2], device=w.device), moment.dtype)
        if factor is None:
            return attention, attention.square()
        return attention * factor, attention.square() * factor

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dout: Tensor, dmembership: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return dw, this rank's part of dtemp, and the gradient of its biases; scans are repeated, not saved."""
        w, temp, bias, membership, energy, *sums = autograd.saved_tensors("tssa", ctx)
        call: StatsCall = ctx.call
        op_checks.backward_causal(dout, dmembership, w, temp, bias, membership, call.whole())
        _check_sums(w, {"energy": energy, "moment": sums[0]}, sums[1])
        squares = _squares(w)
        energy = Causal.energies(call.counted(squares), energy)
        ratio = squares / energy
        moment, mass = Causal.moments(squares, call.counted(membership), *sums)
        attention, slope = Causal.attention(w, moment, call)
        grad_w = dout * w.to(squares.dtype)
        dmoment = slope * grad_w * (membership.unsqueeze(-1) / mass)
        dmass = (dmoment * moment).sum(-1)
        after = call.ranks.after(dmoment.sum(2), dmass.sum(2))
        dmoment, dmass = (call.counted(_suffix(*both)) for both in zip((dmoment, dmass), after, strict=True))
        dmembers = (squares * dmoment).sum(-1) - dmass - (grad_w * attention).sum(-1) + dmembership
        dlogit = _through_softmax(dmembers, membership)
        dtemp = (dlogit * causal_similarity(ratio, bias)).sum((0, 2)).to(temp.dtype)
        dsimilarity = temp.to(dlogit.dtype)[:, None] * dlogit
        dbias = None if bias is None else (w.shape[-1] * dsimilarity.sum(0)).to(bias.dtype)
        per_energy = dsimilarity.unsqueeze(-1) / energy
        denergy = torch.where(energy > _CAUSAL_FLOOR, -ratio * per_energy, 0.0)
        denergy = call.counted(_suffix(denergy, *call.ranks.after(denergy.sum(2))))
        dw = 2 * w * (dmoment * membership.unsqueeze(-1) + per_energy + denergy)
        dw -= dout * (membership.unsqueeze(-1) * attention)
        sources = (dout, dmembership, w, temp, bias)
        grads = operator.merged_layout(dw.to(w.dtype)), dtemp, dbias
        once = (g if g is None else autograd.once_differentiable("tssa", g, *sources) for g in grads)
        return *once, None
