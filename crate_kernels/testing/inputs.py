"""Draws the tensors of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crate_kernels.testing.cases import Case


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case: ``differentiable`` first arguments and the rest, by argument name."""

    differentiable: dict[str, Tensor]
    others: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Convert every floating tensor; the drawn values stay what they were."""
        return Inputs({name: t.to(dtype) for name, t in self.differentiable.items()}, self.others)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Draw the tensors of ``case`` in ``dtype``, so that a promotion to float64 changes no value.

    Args:
        case: which call.
        dtype: dtype of the drawn tensors; temp, denom_bias and weights have it too.
        device: where they are put; they are drawn on the CPU, the same everywhere.
        seed: seed of the draw.

    Raises:
        ValueError: an ista case in which nearly every token has an activation at its threshold.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if case.op in ("ista", "ista_overcomplete"):
        return _ista_inputs(case, dtype, torch.device(device), draw)
    batch, nheads, seqlen, head_dim = case.shape
    others: dict[str, Any] = {}
    if case.lengths:
        w = draw(sum(case.lengths), nheads, head_dim)
        offsets = torch.tensor((0, *case.lengths), device=device).cumsum(0)
        others |= {"cu_seqlens": offsets.to(torch.int32), "max_seqlen": max(case.lengths)}
    else:
        w = draw(batch, nheads, seqlen, head_dim)
    w = _make_special(w * case.magnitude, case.special)
    if case.padding:
        mask = padding_mask(case.padding, batch, seqlen, generator)
        others["key_padding_mask"] = mask.to(device)
        if case.special == "opposed padding":
            # Scores of padded queries from -120 to -136 bits: relative to them, a score of 0 overflows float32.
            opposed = -torch.linspace(5.2, 5.9, seqlen)[:, None]
            w = w + torch.where(mask[:, None, :, None], 4.0, opposed)
    tensors = {"w": _lay_out(w.to(device, dtype), case.layout)}
    if case.op == "tssa":
        tensors["temp"] = (1 + 0.2 * draw(nheads, 1)).to(device, dtype)
        if case.options.get("causal"):
            longest = max(case.lengths) if case.lengths else seqlen
            tensors["denom_bias"] = (0.02 * draw(nheads, longest + 3, 1)).to(device, dtype)
    return Inputs(tensors, others)


def _ista_inputs(case: Case, dtype: torch.dtype, device: torch.device, draw: Any) -> Inputs:
    batch, seqlen, dim = case.shape[:3]
    tokens = batch * seqlen
    hidden = case.shape[3] if case.op == "ista_overcomplete" else dim
    weight = (draw(dim, hidden) * dim**-0.5).to(dtype)
    pool = draw(64 * tokens, dim).to(dtype)
    x = pool[_clear_of_kinks(case, pool.double(), weight.double(), torch.finfo(dtype).eps)][:tokens]
    if len(x) < tokens:
        raise ValueError(f"{case}: too few tokens of {case.shape} are clear of their thresholds in {dtype}")
    x = x.view(batch, seqlen, dim).to(device)
    if case.layout == "strided":
        x = x.repeat_interleave(2, -1)[..., ::2]
    tensors = {"x": x, "weight": weight.to(device)}
    if case.op == "ista_overcomplete" and case.special != "tied":
        tensors["decoder"] = (draw(dim, hidden) * dim**-0.5).to(device, dtype)
    return Inputs(tensors, {})


def _clear_of_kinks(case: Case, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say which tokens have no activation within rounding of its threshold.

    There the gradient jumps, and a last-bit difference in the activation is no error. The distance kept is
    several times the rounding of the update, which ``step_size`` scales: ``eps`` in units of the tokens at 0.1.
    """
    step_size, lambd = case.options.get("step_size", 0.1), case.options.get("lambd", 0.1)
    if case.op == "ista":
        update = x + step_size * (x - x @ weight.T) @ weight
        size = update if case.options.get("nonnegative", True) else update.abs()
        return ((size - step_size * lambd).abs() > 10 * step_size * eps).all(-1)
    code, clear = x.new_zeros(x.shape[0], weight.shape[1]), torch.ones(x.shape[0], dtype=torch.bool)
    for _ in range(case.options.get("steps", 2)):
        update = code + step_size * (x - code @ weight.T) @ weight - step_size * lambd
        clear &= (update.abs() > 2 * eps * step_size).all(-1)
        code = update.relu()
    return clear


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
        w[..., 0] *= 1e-12  # its energy is a normal float32, the square of its energy is none
    elif special == "zero token":
        w[..., ::7, :] = 0.0
    elif special == "mixed norms":
        # Norms from 1/8 to 8: the largest scores are far beyond what a fixed maximum would suit.
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
