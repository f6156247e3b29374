"""Converts packed sequences to a padded batch and back by gathers: no synchronisation, no atomics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim


def unmapped(t: Tensor) -> Tensor:
    """Return what the transforms of ``torch.func`` wrap, with the dimensions that ``vmap`` took away in front."""
    while is_functorch_wrapped_tensor(t):
        dim, t = maybe_get_bdim(t), get_unwrapped(t)
        t = t if dim < 0 else t.movedim(dim, 0)
    return t


def bounds(cu_seqlens: Tensor) -> list[int] | None:
    """Return the offsets as numbers; None where ``vmap`` gives each sample its own."""
    return None if _is_mapped(cu_seqlens) else unmapped(cu_seqlens).tolist()


def _is_mapped(t: Tensor) -> bool:
    return not torch.compiler.is_compiling() and unmapped(t).dim() > t.dim()


@dataclass(frozen=True)
class PackedLayout:
    """Maps between packed tokens and places in the padded batch.

    Attributes:
        mask: (sequences, max_seqlen) bool, True at places that hold a token.
        source: (sequences, max_seqlen) int64, the packed row of each place; clamped at places without a token.
        sequence, position: (total,) int64, the padded place of each packed row.
        inside: (total,) bool, False for rows after the last sequence.
    """

    mask: Tensor
    source: Tensor
    sequence: Tensor
    position: Tensor
    inside: Tensor

    def pad(self, packed: Tensor) -> Tensor:
        """Gather (total, nheads, x) into (sequences, nheads, max_seqlen, x), zero at places without a token."""
        if packed.shape[0] == 0:
            return packed.new_zeros(*self.mask.shape, *packed.shape[1:]).transpose(1, 2)
        # No product with the mask: a place without a token reads another sequence's token, and 0 times NaN is NaN.
        return packed[self.source].masked_fill(~self.mask[:, :, None, None], 0.0).transpose(1, 2)

    def pad_rows(self, packed: Tensor) -> Tensor:
        """Gather (nheads, total) into (sequences, nheads, max_seqlen)."""
        return self.pad(packed.t().unsqueeze(-1)).squeeze(-1)

    def pack(self, padded: Tensor) -> Tensor:
        """Gather (sequences, nheads, max_seqlen, x) back into (total, nheads, x)."""
        out = padded.transpose(1, 2)[self.sequence, self.position]
        return out.masked_fill(~self.inside[:, None, None], 0.0)

    def pack_rows(self, padded: Tensor) -> Tensor:
        """Gather (sequences, nheads, max_seqlen) back into (nheads, total)."""
        return self.pack(padded.unsqueeze(-1)).squeeze(-1).t().contiguous()


def layout(cu_seqlens: Tensor, max_seqlen: int, total: int) -> PackedLayout:
    """Lay out ``total`` packed rows; offsets out of range are clamped, as kernels clamp them."""
    bounds = cu_seqlens.long().clamp(0, total)
    place = torch.arange(max_seqlen, device=bounds.device)
    row = torch.arange(total, device=bounds.device)
    mask = place < (bounds[1:] - bounds[:-1])[:, None]
    source = (bounds[:-1, None] + place).clamp(max=max(total - 1, 0))
    if _is_mapped(bounds):  # PyTorch's rule copies the rows for each sample, and warns of it
        starts = (row[:, None] >= bounds).sum(1)
    else:
        starts = torch.searchsorted(bounds, row, right=True)
    sequence = (starts - 1).clamp(0, mask.shape[0] - 1)
    position = row - bounds[sequence]
    inside = (row < bounds[-1]) & (position >= 0) & (position < max_seqlen)
    return PackedLayout(mask, source, sequence, position.clamp(0, max(max_seqlen - 1, 0)), inside)


def pad(w: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, PackedLayout]:
    """Return packed ``w`` (total, nheads, head_dim) as a padded batch, and the layout of both."""
    where = layout(cu_seqlens, max_seqlen, w.shape[0])
    return where.pad(w), where


def join(parts: list[Tensor], bounds: list[int], total: int, dim: int) -> Tensor:
    """Concatenate the results of sequences along ``dim``; rows of no sequence are 0."""
    before, after = bounds[0], total - bounds[-1]
    if before or after:
        size = list(parts[0].shape)
        empty = (parts[0].new_zeros([*size[:dim], rows, *size[dim + 1 :]]) for rows in (before, after))
        parts = [next(empty), *parts, next(empty)]
    return torch.cat(parts, dim)
