"""Ranges of a sequence's tokens, and the options of their attention to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class RangeTokens(NamedTuple):
    """A range of the sequence's tokens, as queries and as keys.

    Attributes:
        start: place of the first in the sequence.
        w: (batch, nheads, tokens, head_dim).
        key_padding_mask: (batch, tokens) bool, True = keep; None keeps all.
        dout: gradient of the output, in w's shape and dtype; for the backward, as all below.
        lse: (batch, nheads, tokens), over all keys of the sequence, in fp32 or better.
        delta: sum over channels of dout * out, in lse's shape and dtype, as the backend's ``delta`` rounds it.
        dlse: gradient of lse, in its shape and dtype.
    """

    start: int
    w: Tensor
    key_padding_mask: Tensor | None = None
    dout: Tensor | None = None
    lse: Tensor | None = None
    delta: Tensor | None = None
    dlse: Tensor | None = None

    @property
    def stop(self) -> int:
        """The place after the last."""
        return self.start + self.w.shape[2]

    @property
    def positions(self) -> Tensor:
        """Places in the sequence, (tokens,) int64."""
        return torch.arange(self.start, self.stop, device=self.w.device)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return dout, lse, delta and dlse, which a backward needs."""
        assert self.dout is not None
        assert self.lse is not None
        assert self.delta is not None
        assert self.dlse is not None
        return self.dout, self.lse, self.delta, self.dlse

    def part(self, place: slice) -> RangeTokens:
        """Return some of the tokens."""
        mask = self.key_padding_mask
        rest = (None if t is None else t[:, :, place] for t in (self.dout, self.lse, self.delta, self.dlse))
        return RangeTokens(
            self.start + place.start, self.w[:, :, place], None if mask is None else mask[:, place], *rest
        )

    def chunks(self, size: int) -> Iterator[tuple[slice, RangeTokens]]:
        """Yield parts of at most ``size`` tokens, and their places."""
        tokens = self.w.shape[2]
        for first in range(0, tokens, size):
            place = slice(first, min(first + size, tokens))
            yield place, self.part(place)


class RectangularCall(NamedTuple):
    """Options of a forward and of its backward.

    Attributes:
        row_mask: (batch, rows) bool, True = keep; None keeps all. The backward reads it: there the rows are keys too.
        column_mask: the same of the columns.
        row_start: place of the first row in the sequence.
        column_start: place of the first column in the sequence.
        causal: each token attends to itself and earlier ones only.
        scale: factor of the scores.
        seed: int64 scalar that dropout draws from; None without dropout.
        dropout_p: probability with which a weight is dropped.
        first_head: index of the first head that is here, for dropout.
        nheads: number of heads of the whole operator, for dropout; 0 if all are here.
    """

    row_mask: Tensor | None = None
    column_mask: Tensor | None = None
    row_start: int = 0
    column_start: int = 0
    causal: bool = False
    scale: float = 1.0
    seed: Tensor | None = None
    dropout_p: float = 0.0
    first_head: int = 0
    nheads: int = 0

    def between(self, rows: RangeTokens, columns: RangeTokens) -> RectangularCall:
        """Return the same call for these tokens."""
        return self._replace(
            row_mask=rows.key_padding_mask,
            column_mask=columns.key_padding_mask,
            row_start=rows.start,
            column_start=columns.start,
        )

    def tokens(self, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> tuple[RangeTokens, RangeTokens]:
        """Return the ranges of this call; either has w and, for a backward, dout, lse, delta and dlse."""
        w, *rest = rows
        column_w, *column_rest = columns
        return (
            RangeTokens(self.row_start, w, self.row_mask, *rest),
            RangeTokens(self.column_start, column_w, self.column_mask, *column_rest),
        )


def sees(queries: RangeTokens, keys: RangeTokens, call: RectangularCall) -> bool:
    """Return whether any of the queries may attend to any of the keys, as far as their places say."""
    return queries.w.shape[2] > 0 and keys.w.shape[2] > 0 and not (call.causal and queries.stop <= keys.start)
