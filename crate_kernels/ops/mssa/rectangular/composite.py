"""Attention of rows to columns by PyTorch's operators, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from crate_kernels._core import operator, philox
from crate_kernels.ops.mssa.rectangular import op_checks
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall, sees

# Scores alive at once: 64 MB in fp32, enough that a launch costs nothing beside them.
_CHUNK_ELEMENTS = 1 << 24
_DELTA_ROWS = 64  # rows that are multiplied with each other, for the diagonal alone


def _chunks(rows: RangeTokens, columns: RangeTokens) -> Iterator[tuple[slice, RangeTokens]]:
    """Yield parts of the rows that make about ``_CHUNK_ELEMENTS`` scores, and their places."""
    batch, nheads = rows.w.shape[:2]
    return rows.chunks(max(1, _CHUNK_ELEMENTS // max(1, batch * nheads * columns.w.shape[2])))


def _hide(scores: Tensor, queries: RangeTokens, keys: RangeTokens, call: RectangularCall) -> Tensor:
    """Return (batch, nheads, queries, keys) scores with -inf where the key is not allowed."""
    if call.causal and queries.start < keys.stop - 1:
        scores = scores.masked_fill(keys.positions > queries.positions[:, None], -torch.inf)
    if keys.key_padding_mask is not None:
        scores = scores.masked_fill(~keys.key_padding_mask[:, None, None, :], -torch.inf)
    return scores


def _factor(queries: RangeTokens, keys: RangeTokens, call: RectangularCall, dtype: torch.dtype) -> Tensor | None:
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


def forward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> tuple[Tensor, Tensor]:
    """Return the output and lse of the rows over these columns alone, in fp32 or better."""
    op_checks.forward(rows, columns, call)
    dtype = operator.stat_dtype(rows.w.dtype)
    out = rows.w.new_zeros(rows.w.shape, dtype=dtype)
    lse = out.new_full(rows.w.shape[:3], -torch.inf)
    if not sees(rows, columns, call):
        return out, lse
    keys = columns.w.to(dtype)
    for place, chunk in _chunks(rows, columns):
        scores = _hide(call.scale * (chunk.w.to(dtype) @ keys.mT), chunk, columns, call)
        row_max = _finite(scores.amax(-1, keepdim=True))
        weights = (scores - row_max).exp_()
        total = weights.sum(-1, keepdim=True)
        # The total of a row with an infinite score is NaN.
        lse[:, :, place] = torch.where(row_max == torch.inf, row_max, row_max + total.log()).squeeze(-1)
        # Shares of their own sum: exp(scores - lse) would give every weight of a row the rounding of its lse.
        sums = _times(weights, _factor(chunk, columns, call, dtype)) @ keys
        out[:, :, place] = sums / total.masked_fill(total == 0.0, 1.0)
    return out, lse


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return the product of each row of ``dout`` with the same row of ``out``, in fp32 or better.

    The diagonal of a product as the backward's is summed in its order: where one weight is all, they cancel.
    """
    op_checks.delta(dout, out)
    dtype, rows = operator.stat_dtype(dout.dtype), dout.shape[2]
    # Whole blocks: a product of fewer rows may be summed in another order.
    g, o = (F.pad(t.to(dtype), (0, 0, 0, -rows % _DELTA_ROWS)).unflatten(2, (-1, _DELTA_ROWS)) for t in (dout, out))
    return (g @ o.mT).diagonal(dim1=-2, dim2=-1).flatten(2)[:, :, :rows].contiguous()


def backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> Tensor:
    """Return what the columns, as keys and as queries, add to the gradient of the rows, in fp32 or better."""
    op_checks.backward(rows, columns, call)
    dtype = operator.stat_dtype(rows.w.dtype)
    dw = rows.w.new_zeros(rows.w.shape, dtype=dtype)
    if not (sees(rows, columns, call) or sees(columns, rows, call)):
        return dw
    column_dout, column_lse, column_delta, column_dlse = columns.gradients()
    column_w, column_dout = columns.w.to(dtype), column_dout.to(dtype)
    for place, chunk in _chunks(rows, columns):
        dout, lse, delta, dlse = chunk.gradients()
        w, dout = chunk.w.to(dtype), dout.to(dtype)
        scores = call.scale * (w @ column_w.mT)
        dscores = torch.zeros_like(scores)
        if sees(chunk, columns, call):
            weights = (_hide(scores, chunk, columns, call) - _finite(lse).unsqueeze(-1)).exp_()
            dweights = _times(dout @ column_w.mT, _factor(chunk, columns, call, dtype))
            dscores += weights * (dweights - delta.unsqueeze(-1) + dlse.unsqueeze(-1))
        if sees(columns, chunk, call):
            # Transposed: the columns are the queries, the rows their keys.
            hidden = _hide(scores.mT, columns, chunk, call)
            weights = (hidden - _finite(column_lse).unsqueeze(-1)).exp_()
            factor = _factor(columns, chunk, call, dtype)
            dweights = _times(column_dout @ w.mT, factor)
            dscores += (weights * (dweights - column_delta.unsqueeze(-1) + column_dlse.unsqueeze(-1))).mT
            dw[:, :, place] = _times(weights, factor).mT @ column_dout
        dw[:, :, place] += call.scale * (dscores @ column_w)
    return dw
