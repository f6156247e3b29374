"""The op boundary of the attention of rows to columns.

A kernel module defines forward and backward of two ``RangeTokens``, and the delta of some rows, which the backward
subtracts from its own products. Each returns fp32 or better, in the rows' shapes and contiguous: results of several
columns are added up afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import backends, op_checks, operator
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall

PART = "mssa.rectangular"
backends.add_part(PART)
for _function in ("forward", "delta", "backward"):
    backends.PUBLIC[PART, _function] = "mssa"
_LARGE = 16.0  # |lse| in nats: the backward multiplies the rounding error of delta by the size of scores
_OPTIONS = f"{operator.schema_of(RectangularCall)}, str backend"


def _run_forward(*args: Any) -> tuple[Tensor, Tensor]:
    (rows, columns), call, backend = operator.split(RectangularCall, args)
    return backends.run(PART, "forward", backend, rows, *call.tokens((rows,), (columns,)), call)


def _run_delta(dout: Tensor, out: Tensor, backend: str) -> Tensor:
    return backends.run(PART, "delta", backend, dout, dout, out)


def _run_backward(*args: Any) -> Tensor:
    tensors, call, backend = operator.split(RectangularCall, args)
    return backends.run(PART, "backward", backend, tensors[0], *call.tokens(tensors[:5], tensors[5:]), call)


def _fake_forward(rows: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = rows.new_empty(rows.shape, dtype=operator.stat_dtype(rows.dtype))
    return out, out.new_empty(rows.shape[:3])


def _fake_delta(dout: Tensor, out: Tensor, backend: str) -> Tensor:
    return dout.new_empty(dout.shape[:3], dtype=operator.stat_dtype(dout.dtype))


def _fake_backward(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape, dtype=operator.stat_dtype(rows.dtype))


def _pairs(queries: int, keys: int, ahead: int) -> int:
    """Count the pairs of a causal mask, the first query being ``ahead`` places after the first key."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    below = triangle(queries + ahead) - triangle(ahead)
    return below - triangle(queries + ahead - keys) + triangle(ahead - keys)


def _flops(args: tuple, as_queries: int, as_keys: int) -> int:
    """FLOP of products over what the rows see, and over what sees them; tensors among ``args`` are their shapes."""
    shapes, call, _ = operator.split(RectangularCall, args)
    (batch, nheads, rows, head_dim), columns = shapes[0], shapes[len(shapes) // 2][2]
    ahead = call.row_start - call.column_start
    every = rows * columns
    seen = _pairs(rows, columns, ahead) if call.causal else every
    seeing = _pairs(columns, rows, -ahead) if call.causal else every
    return 2 * batch * nheads * head_dim * (as_queries * seen + as_keys * seeing)


mssa_rectangular_fwd = operator.define(
    f"mssa_rectangular_fwd(Tensor rows, Tensor columns, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_forward,
    _fake_forward,
    flops=lambda *args, out_shape=None, **_: _flops(args, 2, 0),
)
mssa_rectangular_delta = operator.define(
    "mssa_rectangular_delta(Tensor dout, Tensor out, str backend) -> Tensor", _run_delta, _fake_delta
)
# Over all ranges of a sequence the products add up to the five of the whole backward.
mssa_rectangular_bwd = operator.define(
    "mssa_rectangular_bwd(Tensor rows, Tensor dout, Tensor lse, Tensor delta, Tensor dlse, Tensor columns, "
    f"Tensor column_dout, Tensor column_lse, Tensor column_delta, Tensor column_dlse, {_OPTIONS}) -> Tensor",
    _run_backward,
    _fake_backward,
    flops=lambda *args, out_shape=None, **_: _flops(args, 2, 3),
)


def forward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall, backend: str) -> tuple[Tensor, Tensor]:
    """Return the output and lse of the rows over these columns alone; a row without a key gives 0 and -inf."""
    return mssa_rectangular_fwd(rows.w, columns.w, *call.between(rows, columns), backend)


def rounded(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` in ``dtype`` and, where that rounds it, what the rounding took, in ``dtype`` too."""
    if out.dtype == dtype:
        return out, None
    result = out.to(dtype)
    return result, (out - result).to(dtype)


def delta(
    w: Tensor, dout: Tensor, out: Tensor, lse: Tensor, call: RectangularCall, backend: str, low: Tensor | None = None
) -> Tensor:
    """Return the product of each row of ``dout`` with the same row of ``out + low``, which the backward subtracts.

    ``g . o = f g . w + g . (o - f w)`` of a row whose output is about its own token times the dropout factor f: the
    first is rounded as the backward's own product is, which it is subtracted from; the second is small, and 0 if
    ``out`` is the rounded token. Where scores are large another token may have all of the weight, and be ``out``:
    ``g . o`` is rounded so too. Elsewhere PyTorch's sum rounds less. In 16 bits ``low`` is what rounding took from
    ``out``, which may be most of what the backward's differences leave.
    """
    dtype = operator.stat_dtype(w.dtype)
    factor = 1.0 if call.seed is None else 1.0 / (1.0 - call.dropout_p)
    g, o, own = dout.to(dtype), out.to(dtype), factor * w.to(dtype)
    is_own = (o * own).sum(-1) > 0.5 * own.square().sum(-1)
    product = mssa_rectangular_delta(dout, torch.where(is_own.unsqueeze(-1), w, out), backend)
    own, own_low = rounded(own, out.dtype)
    rest = o - own.to(dtype)
    another = torch.where(lse.abs() > _LARGE, product, (g * o).sum(-1))
    if low is not None:
        op_checks.tensor("mssa backward", "low", low, out.dtype, out.shape, out.device)
        taken = low.to(dtype)
        another = another + (g * taken).sum(-1)
        rest = rest + (taken if own_low is None else taken - own_low.to(dtype))
    return torch.where(is_own, factor * product + (g * rest).sum(-1), another)


def backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall, backend: str) -> Tensor:
    """Return what the columns, as keys and as queries, add to the gradient of the rows."""
    inputs = rows.w, *rows.gradients(), columns.w, *columns.gradients()
    return mssa_rectangular_bwd(*inputs, *call.between(rows, columns), backend)


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge the results of the same rows over two sets of columns, in place, in the first two tensors.

    ``out`` is (batch, nheads, rows, head_dim), ``lse`` (batch, nheads, rows), both in fp32 or better.
    """
    max_lse = torch.maximum(lse, more_lse)
    max_lse = max_lse.masked_fill(max_lse == -torch.inf, 0.0)
    share, more = (lse - max_lse).exp(), (more_lse - max_lse).exp()
    total = share + more
    # Shares of their own sum: exp(lse - the lse of both) would give every weight of a row the rounding of that lse.
    whole = total.clamp(min=1.0).unsqueeze(-1)  # one share is 1, unless the row has no key
    out.mul_(share.unsqueeze(-1) / whole).add_(more_out * (more.unsqueeze(-1) / whole))
    # The total with an infinite score is NaN.
    lse.copy_(torch.where(max_lse == torch.inf, max_lse, max_lse + total.log()))
