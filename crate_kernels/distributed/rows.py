"""Subspace attention in which every rank keeps its rows: one tensor travels, where others send keys and values.

Form "gather" fetches everybody's tokens at once, form "ring" one rank's at a time, the next ones on their way already.
The backward sends w and dout, and lse, delta and dlse; a rank then has all that the gradient of its own rows needs, so
that nothing is added up over ranks: crate_kernels/ops/mssa/rectangular/__init__.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import autograd, operator
from crate_kernels.distributed.collectives import Ranks, without_autocast
from crate_kernels.distributed.layout import SequenceLayout
from crate_kernels.ops.mssa import rectangular
from crate_kernels.ops.mssa.rectangular import RangeTokens


class RowsCall(NamedTuple):
    """Options of a call.

    Attributes:
        ranks: the processes.
        where: the tokens of each.
        ring: fetch the tokens of one rank at a time.
        masks: each rank's (batch, own) bool key_padding_mask; None keeps all keys.
        attention: options of the attention itself.
        backend: the op's argument.
    """

    ranks: Ranks
    where: SequenceLayout
    ring: bool
    masks: list[Tensor] | None
    attention: rectangular.RectangularCall
    backend: str

    def visits(self, *own: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank and its tensors (batch, nheads, its tokens, ...), this rank's own first."""
        around = _around(self.ranks, self.where, own) if self.ring else _at_once(self.ranks, self.where, own)
        yield from around

    def tokens(self, rank: int, *tensors: Tensor) -> RangeTokens:
        """Return the tokens of a rank, numbered from 0, with the tensors of a backward if they are passed."""
        w, *rest = tensors
        return RangeTokens(0, w, None if self.masks is None else self.masks[rank], *rest)

    def ranges(self, rank: int, tokens: RangeTokens) -> Iterator[tuple[slice, RangeTokens]]:
        """Yield the ranges of tokens of a rank, and their places among its tokens."""
        for place, each in self.where.pieces(rank):
            yield place, tokens.part(place)._replace(start=each.start)

    def meetings(
        self, own: RangeTokens, rank: int, theirs: RangeTokens
    ) -> Iterator[tuple[slice, RangeTokens, RangeTokens]]:
        """Yield ranges of this rank's tokens and of another's, and the place of the former among its own."""
        if rank == self.ranks.rank and self.attention.seed is None:
            # In the sequence's order: among themselves, only dropout asks for their places.
            yield slice(None), own, own
            return
        for place, rows in self.ranges(self.ranks.rank, own):
            for _, columns in self.ranges(rank, own if rank == self.ranks.rank else theirs):
                yield place, rows, columns


def _at_once(ranks: Ranks, where: SequenceLayout, own: tuple[Tensor, ...]) -> Iterator[tuple[int, list[Tensor]]]:
    """Gather all ranks' tensors, then yield them."""
    gathered = [ranks.gather(t, where.lengths, dim=2) for t in own]
    for step in range(ranks.size):
        rank = (ranks.rank - step) % ranks.size
        yield rank, [parts[rank] for parts in gathered]


def _around(ranks: Ranks, where: SequenceLayout, own: tuple[Tensor, ...]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield one rank's tensors while they are sent on and the next ones arrive."""
    here = [t.contiguous() for t in own]
    for step in range(ranks.size):
        rank = (ranks.rank - step) % ranks.size
        if step + 1 == ranks.size:
            yield rank, here
            return
        coming = where.lengths[(rank - 1) % ranks.size]
        arriving = [t.new_empty(*t.shape[:2], coming, *t.shape[3:]) for t in here]
        transfers = ranks.start_pass(here, arriving)
        yield rank, here
        for transfer in transfers:
            transfer.wait()
        here = arriving


class RowsFunction(torch.autograd.Function):
    """(out, lse) of this rank's tokens over everybody's, differentiable once with respect to w."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, w: Tensor, call: RowsCall) -> tuple[Tensor, Tensor]:
        """Return out (batch, nheads, own, head_dim) and lse (batch, nheads, own)."""
        out = w.new_zeros(w.shape, dtype=operator.stat_dtype(w.dtype))
        lse = out.new_full(w.shape[:3], -torch.inf)
        own = call.tokens(call.ranks.rank, w)
        for rank, theirs in call.visits(w):
            for place, rows, columns in call.meetings(own, rank, call.tokens(rank, *theirs)):
                if rectangular.sees(rows, columns, call.attention):
                    more = rectangular.forward(rows, columns, call.attention, call.backend)
                    rectangular.merge_(out[:, :, place], lse[:, :, place], *more)
        out, low = rectangular.rounded(out, w.dtype)
        out = operator.merged_layout(out)
        ctx.save_for_backward(w, out, lse, low)
        ctx.call = call
        return out, lse

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return dw, complete."""
        w, out, lse, low = autograd.saved_tensors("mssa", ctx)
        call: RowsCall = ctx.call
        numbers = lse, rectangular.delta(w, dout, out, lse, call.attention, call.backend, low), dlse
        dw = w.new_zeros(w.shape, dtype=lse.dtype)
        own = call.tokens(call.ranks.rank, w, dout, *numbers)
        for rank, (both, more) in call.visits(torch.cat((w, dout), -1), torch.stack(numbers, -1)):
            theirs = call.tokens(rank, *both.chunk(2, -1), *more.unbind(-1))
            for place, rows, columns in call.meetings(own, rank, theirs):
                if rectangular.sees(rows, columns, call.attention) or rectangular.sees(columns, rows, call.attention):
                    dw[:, :, place] += rectangular.backward(rows, columns, call.attention, call.backend)
        grad = operator.merged_layout(dw.to(w.dtype))
        return autograd.once_differentiable("mssa", grad, dout, dlse, w), None
