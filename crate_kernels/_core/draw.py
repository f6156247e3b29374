"""Draws the tokens of attention: padded or packed, in any layout, with special values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels._core.spec import Case


def tokens(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, dict[str, Any]]:
    """Return the projected tokens ``w`` of a case, and the mask or the offsets by argument name."""
    batch, nheads, seqlen, head_dim = case.shape
    others: dict[str, Any] = {}
    if case.lengths:
        w = torch.randn(sum(case.lengths), nheads, head_dim, generator=generator)
        offsets = torch.tensor((0, *case.lengths), device=device).cumsum(0)
        others |= {"cu_seqlens": offsets.to(torch.int32), "max_seqlen": max(case.lengths)}
    else:
        w = torch.randn(batch, nheads, seqlen, head_dim, generator=generator)
    w = _make_special(w * case.magnitude, case.special)
    if case.padding:
        mask = padding_mask(case.padding, batch, seqlen, generator)
        others["key_padding_mask"] = mask.to(device)
        if case.special == "opposed padding":
            # Scores of padded queries from -120 to -136 bits: relative to them, a score of 0 overflows float32.
            opposed = -torch.linspace(5.2, 5.9, seqlen)[:, None]
            w = w + torch.where(mask[:, None, :, None], 4.0, opposed)
    return _lay_out(w.to(device, dtype), case.layout), others


@checks.suggesting
def padding_mask(kind: str, batch: int, seqlen: int, generator: torch.Generator) -> Tensor:
    """Draw a (batch, seqlen) bool mask, True = keep; "row" pads the last sequence entirely."""
    lengths = torch.randint(1, seqlen + 1, (batch, 1), generator=generator)
    place = torch.arange(seqlen)
    if kind == "left":
        return place >= seqlen - lengths
    if kind == "scattered":
        return torch.rand(batch, seqlen, generator=generator) < 0.6
    mask = place < lengths
    if kind == "row":
        mask[-1] = False
    return mask


def _make_special(w: Tensor, special: str) -> Tensor:
    if special == "dead channel":
        w[..., 0] = 0.0
    elif special == "faint channel":
        w[..., 0] *= 1e-12  # its energy is a normal float32 number; the square of its energy is not
    elif special == "zero token":
        w[..., ::7, :] = 0.0
    elif special == "mixed norms":
        # Norms from 1/8 to 8: the largest scores are far beyond any fixed maximum.
        w *= 2.0 ** torch.linspace(-3, 3, w.shape[-2])[:, None]
    elif special == "common mean":
        w += 4.0
    return w


def _lay_out(w: Tensor, layout: str) -> Tensor:
    if layout == "projection" and w.dim() == 4:
        return w.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        wide = torch.cat([w, w], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
        return wide[..., : w.shape[-1]]
    return w
