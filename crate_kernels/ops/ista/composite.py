"""Sparse-coding steps as few library products as possible, with hand-written backwards.

Products of (tokens, dim, dim), published against here: forward 3 against 1, backward 6 against 2,
with two dim^3 products beside them. For few tokens the dim^3 products dominate and the two-product form,
which has none, takes over. Derivations are in ``reference.py``.

The threshold enters the product as a bias, y = relu(x + eta (x K - lambda)): one pass less, and
in half precision x + eta (...) is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    x: Tensor, weight: Tensor, step_size: float, lambd: float, nonnegative: bool, compute: torch.dtype
) -> Tensor:
    """Return y; products run in ``compute``, the residual is added in x's dtype."""
    tokens = _rows(x)
    operand = tokens.to(compute)
    if tokens.shape[0] >= weight.shape[0]:
        left, right = operand, _gram(weight, compute)
    else:
        right = weight.to(compute)
        left = torch.addmm(operand, operand, right.t(), alpha=-1)
    if nonnegative:
        product = torch.addmm(right.new_full((), -lambd), left, right)
        return _add(tokens, product, step_size).relu_().view(x.shape)
    return F.softshrink(_add(tokens, left @ right, step_size), step_size * lambd).view(x.shape)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    step_size: float,
    lambd: float,
    nonnegative: bool,
    compute: torch.dtype,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; an empty tensor for the one not needed."""
    dim = x.shape[-1]
    tokens, dy, y = _rows(x), _rows(dy), _rows(y)
    if nonnegative:
        active = torch.ops.aten.threshold_backward(dy, y, 0)  # dy where y > 0, in one pass
    else:
        active = torch.where(y != 0, dy, 0)
    g, operand = active.to(compute), tokens.to(compute)
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    products_saved = tokens.shape[0] * (3 if need_dx and need_dweight else 1)
    if products_saved >= dim * (2 if need_dx and need_dweight else 1):
        if need_dx:
            dx = _add(active, g @ _gram(weight, compute).t(), step_size).view(x.shape)
        if need_dweight:
            dk = _scaled(operand.t(), g, step_size).to(weight.dtype)
            dweight = torch.addmm(dk, weight, dk + dk.t(), alpha=-1)
        return dx, dweight
    matrix = weight.to(compute)
    dr = (g @ matrix.t()).mul_(step_size)
    if need_dx:
        dx = _add(active, torch.addmm(dr, dr, matrix, alpha=-1), 1.0).view(x.shape)
    if need_dweight:
        residual = torch.addmm(operand, operand, matrix.t(), alpha=-1)
        dweight = _scaled(residual.t(), g, step_size).addmm_(dr.t(), operand, alpha=-1).to(weight.dtype)
    return dx, dweight


def _rows(t: Tensor) -> Tensor:
    """View tokens as rows; of no channels -1 could be any number."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def _add(tokens: Tensor, product: Tensor, scale: float) -> Tensor:
    """Return tokens + scale * product in tokens' dtype and contiguous, as the fakes say; in place if it can."""
    out = product if product.dtype == tokens.dtype else torch.empty_like(product, dtype=tokens.dtype)
    return torch.add(tokens, product, alpha=scale, out=out)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right, scaled before it is rounded: a sum over all tokens may be beyond fp16 unscaled."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _gram(weight: Tensor, compute: torch.dtype) -> Tensor:
    """Return K = W - W^T W, formed in weight's dtype and rounded once."""
    return torch.addmm(weight, weight.t(), weight, alpha=-1).to(compute)


def forward_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, step_size: float, lambd: float, steps: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the codes z_1..z_steps and the residuals r_1..; the latter two empty unless ``keep``."""
    tokens = _rows(x)
    matrix = weight.to(x.dtype)
    bias = matrix.new_full((), -lambd)
    # z_0 = 0 makes r_0 = x: the first step is one product.
    code = torch.addmm(bias, tokens, matrix, beta=step_size, alpha=step_size).relu_()
    codes, residuals = [code], []
    for _ in range(steps - 1):
        residual = torch.addmm(tokens, code, matrix.t(), alpha=-1)
        code = torch.add(code, torch.addmm(bias, residual, matrix), alpha=step_size).relu_()
        if keep:
            codes.append(code)
            residuals.append(residual)
    out = (code @ (matrix if decoder is None else decoder.to(x.dtype)).t()).view(x.shape)
    if not keep:
        return out, x.new_empty(0), x.new_empty(0)
    return out, torch.stack(codes), torch.stack(residuals) if residuals else x.new_empty(0, *tokens.shape)


def backward_overcomplete(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    decoder: Tensor | None,
    codes: Tensor,
    residuals: Tensor,
    step_size: float,
    lambd: float,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and ddecoder; the last empty where the decoder is ``weight``."""
    dout, tokens, matrix = _rows(dout), _rows(x), weight.to(x.dtype)
    ddecoder = (dout.t() @ codes[-1]).to(weight.dtype)
    dcode = dout @ (matrix if decoder is None else decoder.to(x.dtype))
    dx, dweight = tokens.new_zeros(tokens.shape), weight.new_zeros(weight.shape)
    if decoder is None:
        dweight, ddecoder = ddecoder, weight.new_empty(0)
    for t in range(steps - 1, -1, -1):
        dcode = torch.ops.aten.threshold_backward(dcode, codes[t], 0)
        dr = (dcode @ matrix.t()).mul_(step_size)
        dx += dr
        residual = residuals[t - 1] if t else tokens
        dweight += _scaled(residual.t(), dcode, step_size)
        if t:
            dweight -= dr.t() @ codes[t - 1]
            dcode = torch.addmm(dcode, dr, matrix, alpha=-1)
    return dx.view(x.shape), dweight, ddecoder
