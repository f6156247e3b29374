"""Checks the tensors of ranges for kernels in Python; csrc/mssa/op_checks.h checks those of kernels in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import op_checks, operator
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall

_BACKWARD = "mssa backward"


def _masks(name: str, rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> None:
    op_checks.floating(name, "rows", rows.w, 4)
    op_checks.floating(name, "columns", columns.w, 4)
    batch, nheads, _, head_dim = rows.w.shape
    device = rows.w.device
    op_checks.tensor(name, "columns", columns.w, rows.w.dtype, (batch, nheads, columns.w.shape[2], head_dim), device)
    for side, label in ((rows, "row_mask"), (columns, "column_mask")):
        if side.key_padding_mask is not None:
            op_checks.tensor(name, label, side.key_padding_mask, torch.bool, (batch, side.w.shape[2]), device)
    if call.seed is not None:
        op_checks.tensor(name, "seed", call.seed, torch.int64, (), device)


def forward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> None:
    """Check the tensors of a forward."""
    _masks("mssa", rows, columns, call)


def delta(dout: Tensor, out: Tensor) -> None:
    """Check a gradient of the output, and the output."""
    op_checks.floating(_BACKWARD, "dout", dout, 4)
    op_checks.tensor(_BACKWARD, "out", out, dout.dtype, dout.shape, dout.device)


def backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> None:
    """Check the tensors of a backward."""
    _masks(_BACKWARD, rows, columns, call)
    for side, label in ((rows, ""), (columns, "column_")):
        w, (dout, *numbers) = side.w, side.gradients()
        op_checks.tensor(_BACKWARD, f"{label}dout", dout, w.dtype, w.shape, w.device)
        for name, number in zip(("lse", "delta", "dlse"), numbers, strict=True):
            op_checks.tensor(_BACKWARD, label + name, number, operator.stat_dtype(w.dtype), w.shape[:3], w.device)
