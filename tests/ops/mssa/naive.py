"""Multi-head subspace self-attention, one query and one key at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _weights(scores: Tensor, lse: Tensor, phi: str, threshold: float | None) -> Tensor:
    """phi of one query's scores: softmax (CRATE Eq. 11), h(softmax) (AoT Theorem 3.1), relu or identity."""
    if phi == "relu":
        return torch.stack([s if s > 0 else torch.zeros_like(s) for s in scores])
    if phi == "identity":
        return scores
    probs = torch.stack([(s - lse).exp() for s in scores])
    if phi == "softmax":
        return probs
    assert threshold is not None
    return torch.stack([torch.full_like(p, threshold if p > threshold else 0.0) for p in probs])


def mssa_loop(
    w: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    phi: str = "softmax",
    threshold: float | None = None,
    key_padding_mask: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend with one projection: ``out_i = sum_j phi(scale w_i . w_j) w_j`` (CRATE Eq. 11; AoT Theorem 3.1).

    ``lse_i = log sum_j exp(scale w_i . w_j)`` over the keys allowed; no key: out 0, lse -inf.
    """
    batch, nheads, seqlen, head_dim = w.shape
    factor = head_dim**-0.5 if scale is None else scale
    outs, lses = [], []
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(nheads) for i in range(seqlen)):
        keys = [j for j in range(seqlen) if key_padding_mask is None or key_padding_mask[b, j]]
        keys = [j for j in keys if j <= i or not causal]
        out, lse = w.new_zeros(head_dim), w.new_full((), -torch.inf)
        if keys:
            scores = torch.stack([factor * (w[b, h, i] @ w[b, h, j]) for j in keys])
            top = scores.max().detach()
            lse = top + torch.stack([(s - top).exp() for s in scores]).sum().log()
            for j, weight in zip(keys, _weights(scores, lse, phi, threshold), strict=True):
                if keep is None or keep[b, h, i, j]:
                    out = out + weight / (1 - dropout_p) * w[b, h, j]
        outs.append(out)
        lses.append(lse)
    stacked_lse = torch.stack(lses).view(batch, nheads, seqlen) if phi in ("softmax", "threshold") else None
    return torch.stack(outs).view(w.shape), stacked_lse


def _allowed(query: int, key: int, causal: bool, mask: Tensor | None, batch: int, place: int) -> bool:
    """Whether the query at a place of the sequence may see the key at another; ``place`` is the key's in its mask."""
    return (key <= query or not causal) and (mask is None or bool(mask[batch, place]))


def rectangular_loop(
    rows: Tensor, columns: Tensor, call: Any, keep: Callable[[int, int, int], bool] = lambda *_: True
) -> tuple[Tensor, Tensor]:
    """Attend from each row to the columns; ``keep(head, query's place, key's place)`` tells what dropout keeps."""
    out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:3], -torch.inf)
    for b, h, i in itertools.product(*map(range, rows.shape[:3])):
        query, weights, total = call.row_start + i, [], 0.0
        for j in range(columns.shape[2]):
            if _allowed(query, call.column_start + j, call.causal, call.column_mask, b, j):
                weights.append((j, math.exp(call.scale * float(rows[b, h, i] @ columns[b, h, j]))))
                total += weights[-1][1]
        for j, weight in weights:
            if keep(b * call.nheads + call.first_head + h, query, call.column_start + j):
                out[b, h, i] += weight / total / (1 - call.dropout_p) * columns[b, h, j]
        lse[b, h, i] = math.log(total) if weights else -math.inf
    return out, lse


def rectangular_gradient_loop(
    rows: tuple[Tensor, ...],
    columns: tuple[Tensor, ...],
    call: Any,
    keep: Callable[[int, int, int], bool] = lambda *_: True,
) -> Tensor:
    """Add what each column, as key and as query, gives to dw of each row; both are (w, dout, lse, delta, dlse)."""
    w, dout, lse, delta, dlse = rows
    others, other_dout, other_lse, other_delta, other_dlse = columns
    dw = torch.zeros_like(w)
    for b, h, i, j in itertools.product(*map(range, (*w.shape[:3], others.shape[2]))):
        row, column, head = call.row_start + i, call.column_start + j, b * call.nheads + call.first_head + h
        score, mine, other = call.scale * float(w[b, h, i] @ others[b, h, j]), (b, h, i), (b, h, j)
        if _allowed(row, column, call.causal, call.column_mask, b, j):
            factor = keep(head, row, column) / (1 - call.dropout_p)
            shift = float(delta[mine] - dlse[mine])
            dscore = math.exp(score - lse[mine]) * (factor * float(dout[mine] @ others[other]) - shift)
            dw[mine] += call.scale * dscore * others[other]
        if _allowed(column, row, call.causal, call.row_mask, b, i):
            factor, weight = keep(head, column, row) / (1 - call.dropout_p), math.exp(score - other_lse[other])
            shift = float(other_delta[other] - other_dlse[other])
            dscore = weight * (factor * float(other_dout[other] @ w[mine]) - shift)
            dw[mine] += factor * weight * other_dout[other] + call.scale * dscore * others[other]
    return dw
