"""Parameters of every kernel of subspace attention: csrc/mssa/cuda/problem.cuh."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from torch import Tensor

from crate_kernels._cuda.records import DTYPES, POINTER, Record, fields
from crate_kernels.ops.mssa.call import MSSACall

_PACK = 16  # bytes of a wide access


class MssaRows(Record):
    """A tensor of tokens; strides in elements."""

    cpp = "mssa::Rows"
    _fields_ = (("data", POINTER), *fields(ctypes.c_int64, "batch head row channel"), ("wide", ctypes.c_bool))


class MssaAccess(Record):
    """Access to all tensors of a call."""

    cpp = "mssa::Access"
    _fields_ = (("head_dim", ctypes.c_int), ("wide", ctypes.c_bool))


class MssaMask(Record):
    """The mask by position."""

    cpp = "mssa::Mask"
    _fields_ = (("causal", ctypes.c_bool),)


class MssaRange(Record):
    """Another range of the rows' sequence."""

    cpp = "mssa::Range"
    _fields_ = (
        ("dout", MssaRows),
        *fields(POINTER, "lse delta dlse key_padding_mask"),
        *fields(ctypes.c_int, "count start row_start first_head nheads"),
    )


class MssaInputs(Record):
    """The tensors that a call reads."""

    cpp = "mssa::Inputs"
    _fields_ = (*fields(MssaRows, "w keys dout"), ("dlse", POINTER))


class MssaOutputs(Record):
    """The tensors that a call writes; a backward reads those of the forward."""

    cpp = "mssa::Outputs"
    _fields_ = (*fields(MssaRows, "out dw"), ("lse", POINTER))


class MssaRowScratch(Record):
    """Numbers per row between the kernels of a call."""

    cpp = "mssa::RowScratch"
    _fields_ = fields(POINTER, "delta lse_residual row_max select_level norms")


class MssaMasking(Record):
    """What says which keys a row sees, and which weights dropout keeps."""

    cpp = "mssa::Masking"
    _fields_ = fields(POINTER, "key_padding_mask cache_lengths seed")


class MssaProblem(Record):
    """The tensors of a call in four parts, its sizes and options. Fields of the parts are passed by their names."""

    cpp = "mssa::Problem"
    _fields_ = (
        ("inputs", MssaInputs),
        ("outputs", MssaOutputs),
        ("scratch", MssaRowScratch),
        ("masking", MssaMasking),
        ("cu_seqlens", POINTER),
        *fields(ctypes.c_int, "sequences nheads seqlen total capacity blocks groups"),
        ("access", MssaAccess),
        ("dtype", ctypes.c_int),
        *fields(ctypes.c_float, "scale threshold keep_factor"),
        ("drop_last", ctypes.c_uint32),
        ("mask", MssaMask),
        *fields(ctypes.c_bool, "select values products scores"),
        ("out_dtype", ctypes.c_int),
        ("key_range", MssaRange),
    )

    def __init__(self, **values: Any) -> None:
        for part, kind in PARTS.items():
            values[part] = kind(**{name: values.pop(name) for name in kind.offsets() if name in values})
        super().__init__(**values)


# By the name of the field; no name is in two of them.
PARTS: dict[str, type[Record]] = {
    "inputs": MssaInputs,
    "outputs": MssaOutputs,
    "scratch": MssaRowScratch,
    "masking": MssaMasking,
}


def rows_of(x: Tensor, packed: bool) -> MssaRows:
    """Return a tensor of tokens: (rows, heads, channels) if packed, else (batch, heads, rows, channels)."""
    row, head, channel = (0, 1, 2) if packed else (2, 1, 3)
    strides = x.stride()
    return MssaRows(
        data=x,
        batch=0 if packed else strides[0],
        head=strides[head],
        row=strides[row],
        channel=strides[channel],
        wide=is_wide(x),
    )


def is_wide(x: Tensor) -> bool:
    """Return whether every row is whole packs of 16 bytes, its channels one after another."""
    strides, shape = x.stride(), x.shape
    whole = (shape[-1], *(stride for stride, size in zip(strides[:-1], shape[:-1], strict=True) if size != 1))
    return strides[-1] == 1 and x.data_ptr() % _PACK == 0 and all(n * x.element_size() % _PACK == 0 for n in whole)


def of_forward(w: Tensor, call: MSSACall, out: Tensor, lse: Tensor | None, **more: object) -> dict[str, object]:
    """Return the fields of the problem of a forward; ``more`` replaces some."""
    packed = call.packed
    dropped = {"keep_factor": 1.0}
    if call.seed is not None:
        # p > 0 drops at least one word of Philox; for p = 0 the API draws no seed.
        last = math.ceil(call.dropout_p * 2.0**32) - 1
        dropped = {"keep_factor": 1.0 / (1.0 - call.dropout_p), "drop_last": last}
    fields: dict[str, object] = {
        "w": rows_of(w, packed),
        "keys": rows_of(w, packed),
        "out": rows_of(out, packed),
        "lse": lse if lse is not None and lse.numel() else None,
        "key_padding_mask": contiguous(call.key_padding_mask),
        "cu_seqlens": contiguous(call.cu_seqlens),
        "seed": call.seed,
        "sequences": w.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1,
        "nheads": w.shape[1],
        "seqlen": call.max_seqlen if packed else w.shape[2],
        "total": w.shape[0 if packed else 2],
        "dtype": DTYPES[w.dtype],
        "out_dtype": DTYPES[w.dtype],
        "scale": call.scale,
        "select": call.threshold is not None,
        "threshold": call.threshold or 0.0,
        "mask": MssaMask(causal=call.causal),
        **dropped,
        **more,
    }
    return with_access(fields)


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return a tensor of a call, if there is one, in the order of its elements."""
    return None if x is None else x.contiguous()


def with_access(fields: dict[str, object]) -> dict[str, object]:
    """Add whether all tensors of a problem are accessed in packs."""
    rows = [value for value in fields.values() if isinstance(value, MssaRows)]
    w = rows[0].tensors[0]
    return {**fields, "access": MssaAccess(head_dim=w.shape[-1], wide=all(one.wide for one in rows))}


def of_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    w: Tensor,
    out: Tensor,
    lse: Tensor,
    call: MSSACall,
    dw: Tensor,
    scratch: Tensor,
) -> dict[str, object]:
    """Return the fields of the problem of a backward; ``scratch`` is two of lse's size, with a threshold three.

    What a threshold selects is piecewise constant: scores get a gradient from lse alone. lse, which is rounded, would
    not say exactly what the forward selected.
    """
    packed, select = call.packed, call.threshold is not None
    values = dout is not None
    products = values and not select
    statistics = (
        {"row_max": scratch[1], "select_level": scratch[2]}
        if select and values
        else {"lse_residual": scratch[1], "norms": scratch[1]}  # of other kernels each
    )
    return of_forward(
        w,
        call,
        out,
        lse,
        dw=rows_of(dw, packed),
        dout=rows_of(w if dout is None else dout, packed),
        dlse=dlse,
        delta=scratch[0],
        values=values,
        products=products,
        scores=products or dlse is not None,
        **statistics,
    )
