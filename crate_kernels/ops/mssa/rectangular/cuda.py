"""The problems of ranges for the CUDA C++ kernels. Results are fp32: those of several ranges are put together."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._cuda.records import DTYPES
from crate_kernels.ops.mssa import call as whole
from crate_kernels.ops.mssa.cuda.problem import MssaRange, rows_of, with_access
from crate_kernels.ops.mssa.cuda.problem import of_forward as of_attention
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall


def _between(
    rows: RangeTokens, columns: RangeTokens, call: RectangularCall, out: Tensor, lse: Tensor, more: dict[str, object]
) -> dict[str, object]:
    """Return the fields of a problem of rows that meet columns; ``more`` are fields of their range."""
    seed = {"seed": call.seed, "dropout_p": call.dropout_p}
    attention = whole.MSSACall(scale=call.scale, causal=call.causal, **seed)
    key_range = MssaRange(
        key_padding_mask=call.column_mask,
        count=columns.w.shape[2],
        start=call.column_start,
        row_start=call.row_start,
        first_head=call.first_head,
        nheads=call.nheads or rows.w.shape[1],
        **more,
    )
    found = of_attention(rows.w, attention, out, lse, keys=rows_of(columns.w, False), out_dtype=DTYPES[torch.float32])
    return {**found, "key_range": key_range}


def of_forward(
    rows: RangeTokens, columns: RangeTokens, call: RectangularCall, out: Tensor, lse: Tensor
) -> dict[str, object]:
    """Return the fields of the problem of a forward."""
    return _between(rows, columns, call, out, lse, {})


def of_delta(dout: Tensor, out: Tensor, delta: Tensor) -> dict[str, object]:
    """Return the fields of the problem of delta alone."""
    found = of_attention(dout, whole.MSSACall(), out, None)
    return {**found, "dout": found["w"], "delta": delta}


def of_backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall, dw: Tensor) -> dict[str, object]:
    """Return the fields of the problem of a backward."""
    dout, *numbers = rows.gradients()
    lse, delta, dlse = (t.contiguous() for t in numbers)
    column_dout, *column_numbers = columns.gradients()
    more: dict[str, object] = {"dout": rows_of(column_dout, False)}
    more |= zip(("lse", "delta", "dlse"), (t.contiguous() for t in column_numbers), strict=True)
    found = _between(rows, columns, call, dw, lse, more)
    terms = dict.fromkeys(("values", "products", "scores"), True)
    gradients = {"dw": found["out"], "dout": rows_of(dout, False), "delta": delta, "dlse": dlse}
    return with_access({**found, **gradients, "key_padding_mask": call.row_mask, **terms})
