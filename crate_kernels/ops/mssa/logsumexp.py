"""The logsumexp of the scores, which PyTorch's attention does not return, for composite; differentiable in w.

One product forward and three backward, a chunk of rows at a time. The number of chunks depends on the sizes, so
the loops are inside ops: one compiled graph serves every length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, operator
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import OPTIONAL_SCALE, MSSACall, empty_lse

# Scores alive at once: 64 MB in fp32, enough that a launch costs nothing beside them.
_CHUNK_ELEMENTS = 1 << 24


def _chunks(w: Tensor) -> list[slice]:
    """Split the rows so that a chunk of scores has about ``_CHUNK_ELEMENTS``."""
    batch, nheads, seqlen, _ = w.shape
    size = max(1, _CHUNK_ELEMENTS // max(1, batch * nheads * seqlen))
    return [slice(start, min(start + size, seqlen)) for start in range(0, max(seqlen, 1), size)]


def _scores(w: Tensor, rows: slice, call: MSSACall) -> Tensor:
    """Return the masked scores of some rows."""
    scores = call.scale * (w[:, :, rows] @ w.transpose(-1, -2))
    allowed = call.allowed(w.shape[2], w.device, rows)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _forward(w: Tensor, *options: Any) -> Tensor:
    call = MSSACall(*options).filled(w)
    op_checks.forward(w, call)
    w = w.to(operator.stat_dtype(w.dtype))
    return torch.cat([_scores(w, rows, call).logsumexp(-1) for rows in _chunks(w)], dim=2)


def _backward(dlse: Tensor, w: Tensor, lse: Tensor, *options: Any) -> Tensor:
    # dS = P * dlse; w is the query of a row and the key of a column.
    call = MSSACall(*options).filled(w)
    op_checks.logsumexp_backward(dlse, w, lse, call)
    x, lse = w.to(lse.dtype), lse.masked_fill(lse == -torch.inf, 0.0)
    dw = x.new_zeros(x.shape)
    for rows in _chunks(x):
        ds = (_scores(x, rows, call) - lse[:, :, rows, None]).exp_()
        ds *= dlse[:, :, rows, None]
        dw[:, :, rows] += ds @ x
        dw += ds.transpose(-1, -2) @ x[:, :, rows]
    return dw.mul_(call.scale).to(w.dtype)


def _product(w_shape: tuple[int, ...]) -> int:
    """FLOP of one (seqlen, seqlen, head_dim) product; masked scores are computed too."""
    batch, nheads, seqlen, head_dim = w_shape
    return 2 * batch * nheads * seqlen * seqlen * head_dim


_lse_fwd = operator.define(
    f"mssa_lse_fwd(Tensor w, {OPTIONAL_SCALE}) -> Tensor",
    _forward,
    lambda w, *_: empty_lse(w),
    flops=lambda w_shape, *_, **__: _product(w_shape),
)
_lse_bwd = operator.define(
    f"mssa_lse_bwd(Tensor dlse, Tensor w, Tensor lse, {OPTIONAL_SCALE}) -> Tensor",
    _backward,
    lambda dlse, w, *_: w.new_empty(w.shape),
    flops=lambda dlse_shape, w_shape, *_, **__: 3 * _product(w_shape),
)


@autograd.traced_by_autograd
class LogSumExp(torch.autograd.Function):
    """lse_i = log sum_j exp(scale * w_i . w_j) over the allowed j, in fp32 or better; differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, *options: Any) -> Tensor:
        """Return lse (batch, nheads, seqlen)."""
        return _lse_fwd(w, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Save w and lse."""
        w, *options = inputs
        autograd.save(ctx, LogSumExp, (w,), output, MSSACall(*options), "composite")

    @staticmethod
    def save_tensors(ctx: Any, inputs: tuple, output: Tensor, option_tensors: tuple) -> None:
        """Save tensors."""
        ctx.save_for_backward(*inputs, output, *option_tensors)

    @staticmethod
    def backward(ctx: Any, dlse: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of w."""
        (w, lse), call = autograd.saved("mssa", ctx)
        dw = _lse_bwd(dlse, w, lse, *call)
        return autograd.once_differentiable("mssa", dw, dlse, w), *(None for _ in call)


autograd.differentiate(_lse_fwd, LogSumExp)


def logsumexp(w: Tensor, call: MSSACall) -> Tensor:
    """Return lse (batch, nheads, seqlen), through autograd only when a gradient is wanted."""
    if autograd.needs_grad(w) and not operator.is_recorded():
        return LogSumExp.apply(w, *call)  # pyright: ignore[reportReturnType]
    return _lse_fwd(w, *call)
