"""Named cases of the attention of some tokens to others, and their inputs."""

from typing import NamedTuple

import torch

from crate_kernels.ops.mssa.rectangular import RangeTokens, RectangularCall, forward
from tests.ops.common import randn

HEADS = {"first_head": 3, "nheads": 7}  # two of seven heads are here


class Case(NamedTuple):
    """Rows and columns, each (first, last) of a sequence of ``seqlen`` tokens, and the options of the call."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool = False
    dropout_p: float = 0.0
    padded: str = ""
    scale: float | None = None
    magnitude: float = 1.0
    far: bool = False  # all columns are far from all rows
    strided: bool = False
    every_head: bool = False  # no head is elsewhere
    seqlen: int = 200
    head_dim: int = 16


BEFORE, AFTER, ACROSS, WHOLE = (
    ((0, 70), (70, 200)),
    ((135, 200), (0, 135)),
    ((40, 150), (100, 180)),
    ((0, 200), (0, 200)),
)
CASES = {
    "before": Case(*BEFORE),
    "after": Case(*AFTER),
    "across": Case(*ACROSS),
    "whole": Case(*WHOLE),
    "uneven": Case((63, 65), (0, 193)),
    "one-row": Case((5, 6), (0, 130)),
    "one-column": Case((0, 70), (90, 91)),
    "one-each": Case((3, 4), (3, 4)),
    "causal-before": Case(*BEFORE, causal=True),
    "causal-after": Case(*AFTER, causal=True),
    "causal-across": Case(*ACROSS, causal=True),
    "causal-whole": Case(*WHOLE, causal=True),
    "causal-inside": Case((70, 100), (0, 200), causal=True),
    "causal-around": Case((0, 200), (70, 100), causal=True),
    "dropout": Case(*AFTER, dropout_p=0.4),
    "dropout-every-head": Case((3, 40), (20, 90), dropout_p=0.4, every_head=True, seqlen=90),
    "dropout-whole": Case(*WHOLE, dropout_p=0.4),
    "causal-dropout-across": Case(*ACROSS, causal=True, dropout_p=0.4),
    "padded": Case(*AFTER, padded="scattered"),
    "padded-whole": Case(*WHOLE, padded="scattered"),
    "padded-row": Case(*BEFORE, padded="row"),
    "padded-rows": Case(*AFTER, padded="rows"),
    "padded-columns": Case(*AFTER, padded="columns"),
    "causal-padded": Case(*ACROSS, causal=True, padded="left"),
    "causal-padded-dropout": Case(*ACROSS, causal=True, dropout_p=0.4, padded="scattered"),
    "no-columns": Case((3, 9), (5, 5)),
    "no-rows": Case((5, 5), (3, 9)),
    "negative-scale": Case(*AFTER, scale=-0.4),
    "causal-zero-scale": Case(*ACROSS, scale=0.0, causal=True),
    "strided": Case(*AFTER, head_dim=33, strided=True),
    "causal-strided": Case(*ACROSS, causal=True, head_dim=33, strided=True),
    "large": Case(*AFTER, magnitude=6.0),
    "saturated": Case(*AFTER, magnitude=40.0, head_dim=48),
    "saturated-whole": Case(*WHOLE, magnitude=40.0, head_dim=48),
    "causal-saturated": Case(*ACROSS, causal=True, magnitude=40.0, head_dim=48),
    "far": Case((100, 200), (0, 100), far=True),
    "wide": Case((0, 70), (70, 140), head_dim=256, scale=0.01),
}


def mask_of(padded, seqlen):
    """(2, seqlen) bool by kind, or None."""
    if not padded:
        return None
    mask = torch.ones(2, seqlen, dtype=torch.bool)
    if padded in ("scattered", "rows", "columns"):
        mask = torch.rand(2, seqlen, generator=torch.Generator().manual_seed(4)) > 0.3
    elif padded == "left":
        mask[1, : seqlen // 2 + 15] = False
    else:
        mask[0] = False
    return mask


def drawn(case, dtype, device="cpu"):
    """Return the rows, the columns and the call.

    lse and delta are those of the whole sequence, rounded to fp32; dlse is drawn.
    """
    shape = 2, 2, case.seqlen, case.head_dim
    w, dout = (randn(*shape, seed=seed).to(device, dtype) for seed in (0, 1))
    w = w * case.magnitude
    if case.far:
        w[:, :, slice(*case.rows)] += 12.0
        w[:, :, slice(*case.columns)] -= 12.0
    if case.strided:
        w, dout = (t.repeat_interleave(2, -1)[..., ::2].transpose(0, 1).contiguous().transpose(0, 1) for t in (w, dout))
    seed = torch.tensor(77, device=device) if case.dropout_p else None
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    heads = {} if case.every_head else HEADS
    call = RectangularCall(causal=case.causal, scale=scale, seed=seed, dropout_p=case.dropout_p, **heads)
    mask = mask_of(case.padded, case.seqlen)
    if case.padded in ("rows", "columns"):  # the others are all kept, and have no mask
        mask[:, slice(*(case.columns if case.padded == "rows" else case.rows))] = True
    mask = None if mask is None else mask.to(device)
    whole = RangeTokens(0, w.double(), mask)
    out, lse = forward(whole, whole, call, "composite")
    dlse = randn(*shape[:3], seed=2).to(device, torch.float32)
    every = RangeTokens(0, w, mask, dout, lse.float(), (dout.double() * out).sum(-1).float(), dlse)
    rows, columns = every.part(slice(*case.rows)), every.part(slice(*case.columns))
    if case.padded == "rows":
        columns = columns._replace(key_padding_mask=None)
    elif case.padded == "columns":
        rows = rows._replace(key_padding_mask=None)
    return rows, columns, call


def in_dtype(tokens, dtype):
    """Return the same tokens in another dtype, lse, delta and dlse in that of its statistics."""
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    dout, *numbers = tokens.gradients()
    numbers = dict(zip(("lse", "delta", "dlse"), (t.to(stat) for t in numbers), strict=True))
    return tokens._replace(w=tokens.w.to(dtype), dout=dout.to(dtype), **numbers)
