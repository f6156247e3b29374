"""Attention of rows to columns by csrc/mssa: C++ on the CPU, CUDA C++ with fp32 products on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._cuda.launch import is_gpu
from crate_kernels._native.extension import library
from crate_kernels.ops.mssa.cuda import plain
from crate_kernels.ops.mssa.native import check_head_dim
from crate_kernels.ops.mssa.rectangular import cuda, op_checks
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall


def _contiguous(call: RectangularCall) -> RectangularCall:
    """Return the call with contiguous masks."""
    masks = {"row_mask": call.row_mask, "column_mask": call.column_mask}
    return call._replace(**{name: mask.contiguous() for name, mask in masks.items() if mask is not None})


def forward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> tuple[Tensor, Tensor]:
    """Return the output and lse of the rows over these columns alone."""
    check_head_dim(rows.w)
    out = rows.w.new_empty(rows.w.shape, dtype=torch.float32)
    lse = out.new_empty(rows.w.shape[:3])
    if columns.w.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if is_gpu(rows.w.device):
        op_checks.forward(rows, columns, call)
        if out.numel():
            plain.forward(cuda.of_forward(rows, columns, _contiguous(call), out, lse), rows.w, apart=True)
    else:
        library().mssa_rectangular_fwd(rows.w, columns.w, *_contiguous(call), out, lse)
    return out, lse


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return the product of each row of ``dout`` with the same row of ``out``, summed as the backward's are."""
    check_head_dim(dout)
    delta = dout.new_empty(dout.shape[:3], dtype=torch.float32)
    if is_gpu(dout.device):
        op_checks.delta(dout, out)
        if delta.numel():
            plain.find_delta(cuda.of_delta(dout, out, delta), dout)
    else:
        library().mssa_rectangular_delta(dout, out, delta)
    return delta


def backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> Tensor:
    """Return what the columns, as keys and as queries, add to the gradient of the rows."""
    check_head_dim(rows.w)
    dw = rows.w.new_empty(rows.w.shape, dtype=torch.float32)
    if columns.w.shape[2] == 0:
        return dw.zero_()
    if is_gpu(rows.w.device):
        op_checks.backward(rows, columns, call)
        if dw.numel():
            plain.backward(cuda.of_backward(rows, columns, _contiguous(call), dw), rows.w, apart=True)
        return dw
    sides = []
    for side in (rows, columns):
        dout, *numbers = side.gradients()
        sides += [side.w, dout, *(t.contiguous() for t in numbers)]
    library().mssa_rectangular_bwd(*sides, *_contiguous(call), dw)
    return dw
