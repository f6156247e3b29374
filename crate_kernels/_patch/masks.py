"""Meanings of a mask passed to a published attention, and the operator's options for each.

Re-implementations take different masks: over keys or over pairs of tokens, True for kept or for dropped. A probe
tries every ``MaskMeaning``. A call whose mask has none of the proven meanings runs the published forward.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels._core import checks


@dataclass(frozen=True)
class MaskMeaning:
    """One meaning of a mask.

    Attributes:
        rank: 2 to 4.
        pairs: True for the causal mask (..., seqlen, seqlen); False for a mask over keys (batch, ..., seqlen).
        dtype: "bool", "int" or "float"; a number counts as True unless it is 0.
        keep: True if the mask marks the keys to attend to, not those to drop.
        empty: True if a query without any key agrees as well; if not, such calls run the published forward.
    """

    rank: int
    pairs: bool
    dtype: str
    keep: bool
    empty: bool = False

    def draw(self, allowed: Tensor) -> Tensor:
        """Return such a mask for the allowed keys (batch, seqlen), or the allowed pairs (seqlen, seqlen)."""
        seqlen, middle = allowed.shape[-1], (1,) * (self.rank - 2)
        shape = (*middle, seqlen, seqlen) if self.pairs else (allowed.shape[0], *middle, seqlen)
        value = (allowed if self.keep else ~allowed).reshape(shape)
        if self.dtype == "bool":
            return value
        # Not only ones: a forward that multiplies by the mask, or compares it to 0.5, must fail.
        numbers = torch.tensor([1, -1, 2, 3] if self.dtype == "int" else [1.0, -1.0, 0.01, 3.0])
        return value * numbers.repeat(seqlen)[:seqlen]

    def fits(self, value: Tensor, batch: int, seqlen: int) -> bool:
        """Say if a tensor is such a mask, by its rank, shape and dtype."""
        dtype = "bool" if value.dtype == torch.bool else "float" if value.is_floating_point() else "int"
        if value.dim() != self.rank or dtype != self.dtype:
            return False
        *leading, rows, columns = value.shape
        if not self.pairs:
            return columns == seqlen and (*leading, rows) == (batch, *(1,) * (self.rank - 2))
        return (
            rows == columns == seqlen and all(size == 1 for size in leading[1:]) and leading[:1] in ([], [1], [batch])
        )

    def read(self, value: Tensor, causal: bool) -> dict[str, Any] | None:
        """Return the operator's options; None where reading them would wait for a device."""
        kept = value if value.dtype == torch.bool else value != 0
        kept = kept if self.keep else ~kept
        readable = checks._readable(value) is value
        if self.pairs:
            if not readable:
                return None
            lower = torch.ones(kept.shape[-2:], dtype=torch.bool).tril()
            return {"causal": True} if torch.equal(kept, lower.expand_as(kept)) else None
        kept = kept.reshape(value.shape[0], value.shape[-1])
        if not self.empty:
            first = kept[:, :1] if causal else kept
            if not readable or not bool(first.any(1).all()):
                return None
        return {"key_padding_mask": kept}


CANDIDATES = tuple(
    MaskMeaning(rank, pairs, dtype, keep)
    for pairs, rank, dtype, keep in itertools.product((False, True), (2, 3, 4), ("bool", "int", "float"), (True, False))
)


@dataclass(frozen=True)
class Argument:
    """Mask argument of a forward.

    Attributes:
        name: name of the argument.
        absent: True if a call without it, or with None, is the operator without a mask.
        masks: proven meanings of a tensor passed there.
    """

    name: str
    absent: bool = True
    masks: tuple[MaskMeaning, ...] = ()

    def options(self, value: Any, x: Tensor, causal: bool) -> dict[str, Any] | None:
        """Return the operator's options for the mask of a call; None if only the published forward can take it."""
        if value is None:
            return {} if self.absent else None
        if not isinstance(value, Tensor):
            return None
        # Several fit if batch equals seqlen and the forward distinguishes keys from pairs by the shape.
        found = [mask for mask in self.masks if mask.fits(value, x.shape[0], x.shape[1])]
        return found[0].read(value, causal) if len(found) == 1 else None


def argument(module: nn.Module) -> Argument | None:
    """Find the argument of a forward, other than the tokens, with "mask" in its name."""
    try:
        names = list(inspect.signature(type(module).forward).parameters)[2:]
    except (TypeError, ValueError):
        return None
    name = next((name for name in names if "mask" in name), None)
    return None if name is None else Argument(name)
