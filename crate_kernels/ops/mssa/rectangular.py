"""Subspace attention of some tokens to others of one sequence: what a process computes that has a part of it.

``rows`` and ``columns`` are ranges of the sequence's tokens, w of both the same projection. Results of several ranges
of columns are put together by their lse. The backward gives what the columns add to the gradient of the rows, as
queries and keys at once (docs/mssa.md): with everybody's w, dout, lse and delta, each range of tokens is completed
where it is, and nothing is added up over processes. In float32 or better, by PyTorch's operators, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import operator, philox

# Scores alive at once: 64 MB in fp32, enough that a launch costs nothing beside them.
_CHUNK_ELEMENTS = 1 << 24


class Call(NamedTuple):
    """Options of a call.

    Attributes:
        scale: factor of the scores.
        causal: each token attends to itself and those before it only.
        dropout_p: probability with which a weight is dropped.
        seed: int64 scalar that dropout draws from; None without dropout.
        first_head: index of the first head that is here, for dropout.
        nheads: number of heads of one process, for dropout.
    """

    scale: float
    causal: bool = False
    dropout_p: float = 0.0
    seed: Tensor | None = None
    first_head: int = 0
    nheads: int = 0


class Tokens(NamedTuple):
    """A range of the sequence's tokens, as queries and as keys.

    Attributes:
        start: place of the first in the sequence.
        w: (batch, nheads, tokens, head_dim).
        key_padding_mask: (batch, tokens) bool, True = keep; None keeps all.
        dout: gradient of the output, in w's shape; for the backward, as all below.
        lse: (batch, nheads, tokens), over all keys.
        delta: sum over channels of dout * out, less the gradient of lse; (batch, nheads, tokens).
    """

    start: int
    w: Tensor
    key_padding_mask: Tensor | None = None
    dout: Tensor | None = None
    lse: Tensor | None = None
    delta: Tensor | None = None

    @property
    def stop(self) -> int:
        """The place after the last."""
        return self.start + self.w.shape[2]

    @property
    def positions(self) -> Tensor:
        """Places in the sequence, (tokens,) int64."""
        return torch.arange(self.start, self.stop, device=self.w.device)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dout, lse and delta, which a backward needs."""
        assert self.dout is not None
        assert self.lse is not None
        assert self.delta is not None
        return self.dout, self.lse, self.delta

    def part(self, place: slice) -> Tokens:
        """Return some of the tokens."""
        mask = self.key_padding_mask
        rest = (None if t is None else t[:, :, place] for t in (self.dout, self.lse, self.delta))
        return Tokens(self.start + place.start, self.w[:, :, place], None if mask is None else mask[:, place], *rest)

    def chunks(self, others: int) -> Iterator[tuple[slice, Tokens]]:
        """Yield parts that make about ``_CHUNK_ELEMENTS`` scores with ``others`` tokens, and their places."""
        batch, nheads, tokens, _ = self.w.shape
        size = max(1, _CHUNK_ELEMENTS // max(1, batch * nheads * others))
        for first in range(0, tokens, size):
            place = slice(first, min(first + size, tokens))
            yield place, self.part(place)


def sees(queries: Tokens, keys: Tokens, call: Call) -> bool:
    """Return whether any of the queries may attend to any of the keys, as far as their places say."""
    return queries.w.shape[2] > 0 and keys.w.shape[2] > 0 and not (call.causal and queries.stop <= keys.start)


def _hide(scores: Tensor, queries: Tokens, keys: Tokens, call: Call) -> Tensor:
    """Return (batch, nheads, queries, keys) scores with -inf where the key is not allowed."""
    if call.causal and queries.start < keys.stop - 1:
        scores = scores.masked_fill(keys.positions > queries.positions[:, None], -torch.inf)
    if keys.key_padding_mask is not None:
        scores = scores.masked_fill(~keys.key_padding_mask[:, None, None, :], -torch.inf)
    return scores


def _factor(queries: Tokens, keys: Tokens, call: Call, dtype: torch.dtype) -> Tensor | None:
    """Return the dropout factor of each weight (batch, nheads, queries, keys); None without dropout."""
    if call.seed is None:
        return None
    batch, here = queries.w.shape[:2]
    device = queries.w.device
    heads = torch.arange(batch, device=device)[:, None] * (call.nheads or here) + call.first_head
    heads = (heads + torch.arange(here, device=device))[:, :, None, None]
    return philox.keep_factor(call.seed, call.dropout_p, heads, queries.positions[:, None], keys.positions, dtype)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _finite(lse: Tensor) -> Tensor:
    """Return lse with 0 for rows without a key, all of whose scores are -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def forward(rows: Tokens, columns: Tokens, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and lse of the rows over these columns alone, in fp32 or better.

    A row without a key gives 0 and -inf.
    """
    dtype = operator.stat_dtype(rows.w.dtype)
    out = rows.w.new_zeros(rows.w.shape, dtype=dtype)
    lse = out.new_full(rows.w.shape[:3], -torch.inf)
    if not sees(rows, columns, call):
        return out, lse
    keys = columns.w.to(dtype)
    for place, chunk in rows.chunks(columns.w.shape[2]):
        scores = _hide(call.scale * (chunk.w.to(dtype) @ keys.mT), chunk, columns, call)
        lse[:, :, place] = scores.logsumexp(-1)
        weights = (scores - _finite(lse[:, :, place]).unsqueeze(-1)).exp_()
        out[:, :, place] = _times(weights, _factor(chunk, columns, call, dtype)) @ keys
    return out, lse


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Put together, in the first two tensors, the results of the same rows over two sets of columns."""
    total = torch.logaddexp(lse, more_lse)
    safe = _finite(total)
    out.mul_((lse - safe).exp().unsqueeze(-1)).add_(more_out * (more_lse - safe).exp().unsqueeze(-1))
    lse.copy_(total)


def backward(rows: Tokens, columns: Tokens, call: Call) -> Tensor:
    """Return what the columns, as keys and as queries, add to the gradient of the rows, in fp32 or better."""
    dtype = operator.stat_dtype(rows.w.dtype)
    dw = rows.w.new_zeros(rows.w.shape, dtype=dtype)
    if not (sees(rows, columns, call) or sees(columns, rows, call)):
        return dw
    dcolumns, column_lse, column_delta = columns.gradients()
    others, dothers = columns.w.to(dtype), dcolumns.to(dtype)
    for place, chunk in rows.chunks(columns.w.shape[2]):
        dout, lse, delta = chunk.gradients()
        w, dout = chunk.w.to(dtype), dout.to(dtype)
        scores = call.scale * (w @ others.mT)
        dscores = torch.zeros_like(scores)
        if sees(chunk, columns, call):
            weights = (_hide(scores, chunk, columns, call) - _finite(lse).unsqueeze(-1)).exp_()
            dweights = _times(dout @ others.mT, _factor(chunk, columns, call, dtype))
            dscores += weights * (dweights - delta.unsqueeze(-1))
        if sees(columns, chunk, call):
            # Transposed: the columns are the queries, the rows their keys.
            hidden = _hide(scores.mT, columns, chunk, call)
            weights = (hidden - _finite(column_lse).unsqueeze(-1)).exp_()
            factor = _factor(columns, chunk, call, dtype)
            dweights = _times(dothers @ w.mT, factor)
            dscores += (weights * (dweights - column_delta.unsqueeze(-1))).mT
            dw[:, :, place] = _times(weights, factor).mT @ dothers
        dw[:, :, place] += call.scale * (dscores @ others)
    return dw
