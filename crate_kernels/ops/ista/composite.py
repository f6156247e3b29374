"""Sparse-coding steps as few library products as possible, with hand-written backwards.

Products of (tokens, dim, dim), published against here: forward 3 against 1, backward 6 against 2,
with two dim^3 products beside them. For few tokens the dim^3 products dominate and the two-product form,
which has none, takes over. The passes are in ``steps.py``.

The threshold enters the product as a bias, y = relu(x + eta (x K - lambda)): one pass less, and
in half precision x + eta (...) is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from crate_kernels._core import products
from crate_kernels.ops.ista import steps

_MAX_BIAS = 2**-8  # of the largest number: added to a product, a larger threshold may leave the dtype
_TERM_BY_TERM = 3  # rows up to which MKL adds to addmm's input term by term, and rounds at its size each time


class _CompositeEngine(steps.Engine):
    def rows(self, t):
        return steps.flat(t)  # the library takes any strides

    def step(self, left, right, base, call, out=None):
        largest = torch.finfo(right.dtype if base is None else base.dtype).max
        threshold = min(call.threshold, largest)  # a larger one leaves zeros as well
        if not call.nonnegative:
            assert base is not None
            return F.softshrink(_add(base, left @ right, call.step_size), threshold)
        if call.lambd > _MAX_BIAS * torch.finfo(right.dtype).max:
            update = left @ right if base is None else _add(base, left @ right, call.step_size, out)
            update = torch.mul(update, call.step_size, out=out) if base is None else update
            return update.sub_(threshold).relu_()
        bias = right.new_full((), -call.lambd)
        if base is None:
            return _addmm(bias, left, right, call.step_size, call.step_size, out).relu_()
        return _add(base, _addmm(bias, left, right), call.step_size, out).relu_()

    def product(self, left, right, base=None, scale=1.0, gate=None, out=None):
        if base is not None:
            result = _addmm(base, left, right, alpha=scale, out=out)
        else:
            result = torch.mm(left, right, out=out)
            if scale != 1.0:
                result.mul_(scale)
        return result if gate is None else torch.ops.aten.threshold_backward(result, gate, 0)

    def mask(self, dy, y, call, dtype):
        if call.nonnegative:
            return torch.ops.aten.threshold_backward(dy, y, 0)  # dy where y > 0, in one pass
        return torch.where(y != 0, dy, 0)

    def input_gradient(self, upstream, left, right, scale, base=None):
        product = left @ right if base is None else _addmm(base, left, right, alpha=-1.0)
        return _add(upstream.masked, product, scale)


class _OvercompleteEngine(_CompositeEngine):
    def add_over_tokens(self, total, left, right, scale):
        return total.add_(steps.scaled(left.t(), right, scale))  # rounded by itself, unlike the sum of a step of ista


def _add(tokens: Tensor, product: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return tokens + scale * product in tokens' dtype and contiguous, as the fakes say; in place if it can."""
    if out is None:
        out = product if product.dtype == tokens.dtype else torch.empty_like(product, dtype=tokens.dtype)
    return torch.add(tokens, product, alpha=scale, out=out)


def _addmm(
    base: Tensor, left: Tensor, right: Tensor, beta: float = 1.0, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return beta * base + alpha * left @ right, rounded once; few rows on a CPU are added to a whole product."""
    if left.is_cpu and left.dtype == torch.float32 and left.shape[0] <= _TERM_BY_TERM:
        return torch.add(base if beta == 1.0 else beta * base, left @ right, alpha=alpha, out=out)
    return torch.addmm(base, left, right, beta=beta, alpha=alpha, out=out)


class _OnCpu:
    """Products on a CPU."""

    def product_dtype(self, compute, rows):
        return products.fast_dtype(compute, rows)


class _CpuEngine(_OnCpu, _CompositeEngine):
    pass


class _CpuOvercompleteEngine(_OnCpu, _OvercompleteEngine):
    pass


_STEP = {True: _CpuEngine(), False: _CompositeEngine()}
_OVERCOMPLETE = {True: _CpuOvercompleteEngine(), False: _OvercompleteEngine()}


def engine(x: Tensor) -> steps.Engine:
    """Return the engine of a step of ``ista`` on such tokens."""
    return _STEP[x.is_cpu]


forward, backward, forward_overcomplete, backward_overcomplete = steps.passes(engine, lambda x: _OVERCOMPLETE[x.is_cpu])
