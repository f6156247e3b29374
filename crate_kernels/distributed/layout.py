"""Where each rank's tokens are in the whole sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenRange(NamedTuple):
    """Tokens ``start`` to ``stop``, exclusive, of the whole sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


class SequenceLayout(NamedTuple):
    """How a sequence is cut over ranks.

    Attributes:
        lengths: number of tokens of each rank.
        balanced: rank r has chunks r and 2 P - 1 - r of 2 P, so that causal attention costs every rank the same;
            else ranks have one range each, in order.
    """

    lengths: tuple[int, ...]
    balanced: bool

    @property
    def seqlen(self) -> int:
        """Number of tokens of all ranks."""
        return sum(self.lengths)

    def ranges(self, rank: int) -> list[TokenRange]:
        """Return the ranges of a rank, in the order in which it has them."""
        if not self.balanced:
            start = sum(self.lengths[:rank])
            return [TokenRange(start, start + self.lengths[rank])]
        chunks = _ranges(_even(self.seqlen, 2 * len(self.lengths)))
        return [chunks[rank], chunks[-1 - rank]]

    def pieces(self, rank: int) -> list[tuple[slice, TokenRange]]:
        """Return, for each range of a rank, its place among the rank's own tokens, and the range."""
        ranges = self.ranges(rank)
        own = _ranges([each.length for each in ranges])
        return [(slice(*place), each) for place, each in zip(own, ranges, strict=True)]

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """Return the place in the sequence of each token of a rank, (own,) int64."""
        return torch.cat([torch.arange(*each, device=device) for each in self.ranges(rank)])

    def cut(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """Return a rank's part of a whole tensor, a copy."""
        return torch.cat([whole.narrow(dim, each.start, each.length) for each in self.ranges(rank)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor of all ranks' parts."""
        pieces = [
            (each.start, part.narrow(dim, place.start, each.length))
            for rank, part in enumerate(parts)
            for place, each in self.pieces(rank)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])], dim)


def split(seqlen: int, ranks: int, balanced: bool) -> SequenceLayout:
    """Cut a sequence as evenly as ``torch.tensor_split`` does, into one or two chunks per rank."""
    if not balanced:
        return SequenceLayout(tuple(_even(seqlen, ranks)), False)
    chunks = _even(seqlen, 2 * ranks)
    return SequenceLayout(tuple(chunks[r] + chunks[-1 - r] for r in range(ranks)), True)


def _even(seqlen: int, parts: int) -> list[int]:
    """Return lengths that differ by one at most, the longer ones first."""
    return [seqlen // parts + (part < seqlen % parts) for part in range(parts)]


def _ranges(lengths: Sequence[int]) -> list[TokenRange]:
    """Return consecutive ranges of these lengths."""
    return [TokenRange(*both) for both in itertools.pairwise(itertools.accumulate(lengths, initial=0))]
