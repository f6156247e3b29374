"""Sparse-coding steps on a GPU without Triton: PyTorch's products, and all that is between them by csrc/ista.

Whatever stands between two products is one pass over memory. Products of the tokens with a matrix, and passes over
tensors of the tokens' size, (read, written), beside what the products themselves read and write:

====================== ==================== ========= ==============================================================
call                   products             passes    what
====================== ==================== ========= ==============================================================
forward, many tokens   1                    2, 1      product and x in, y out
forward, few           2                    4, 2      the residual likewise
backward, many         2                    4, 2      dy, y in, g' out; product and g' in, dx out
backward, few          5                    9, 3      the same, r = x - x W^T, and dr, dy and y for dx
overcomplete forward   2 steps              2 a step and a residual, 1 out
overcomplete backward  4 steps              2 in, 1 out for each gradient of a code; dx is added up in the products
====================== ==================== ========= ==============================================================

K = W - W^T W is accumulated in float32 and rounded once. The form is chosen by FLOP: as long as no GPU has said
otherwise, one product from dim tokens on, of which training spares three for two of dim^3. Derivations are in
``reference.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._native import extension

extension.load_cuda()
_update = torch.ops.crate_kernels_C.cuda_ista_update.default
_symmetrize = torch.ops.crate_kernels_C.cuda_ista_symmetrize.default


def forward(
    x: Tensor, weight: Tensor, step_size: float, lambd: float, nonnegative: bool, compute: torch.dtype
) -> Tensor:
    """Return y; products run in ``compute``, the residual is added in float32."""
    tokens = _rows(x)
    left = tokens.to(compute)
    if tokens.shape[0] >= weight.shape[0]:
        right = _matrix(weight, compute)
    else:
        right = weight.to(compute)
        left = _residual(left, left, right)
    update = torch.mm(left, right)
    y = _like(update, x.dtype)
    _update(update, tokens, None, None, step_size, step_size * lambd, nonnegative, False, y)
    return y.view(x.shape)


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
    tokens, dy, y = _rows(x), _rows(dy), _rows(y)
    g = torch.empty_like(dy, dtype=compute)
    _update(None, None, dy, y, 1.0, 0.0, False, False, g)
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    # The one-product form spares 3 products with the tokens (of either gradient alone, 1) for 2 (1) of dim^3.
    spared, squares = (3, 2) if need_dx and need_dweight else (1, 1)
    if spared * tokens.shape[0] >= squares * x.shape[-1]:
        if need_dx:
            update = torch.mm(g, _matrix(weight, compute).t())
            dx = _like(update, x.dtype)
            # Rounded to half for the products, the gradient of a float32 stream is not yet what is added.
            through = (g, None, None) if compute == x.dtype else (None, dy, y)
            _update(update, *through, step_size, 0.0, False, False, dx)
        if need_dweight:
            dmatrix = _scaled_product(tokens.to(compute).t(), g, step_size).to(weight.dtype)
            both = torch.empty_like(dmatrix)
            _symmetrize(dmatrix, both)
            dweight = torch.addmm(dmatrix, weight, both, alpha=-1)
    else:
        matrix = weight.to(compute)
        dr = _scaled_product(g, matrix.t(), step_size)
        if need_dx:
            update = torch.mm(dr, matrix)
            dx = _like(update, x.dtype)
            _update(update, dr, dy, y, -1.0, 0.0, False, False, dx)
        if need_dweight:
            operand = tokens.to(compute)
            dweight = _scaled_product(_residual(operand, operand, matrix).t(), g, step_size)
            dweight = dweight.addmm_(dr.t(), operand, alpha=-1).to(weight.dtype)
    return dx.view(x.shape) if need_dx else dx, dweight


def forward_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, step_size: float, lambd: float, steps: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the codes z_1..z_steps and the residuals r_1..; the latter two empty unless ``keep``."""
    tokens, matrix, (dim, hidden) = _rows(x), weight.to(x.dtype), weight.shape
    count = tokens.shape[0]
    codes = x.new_empty((steps, count, hidden) if keep else (1, count, hidden))
    residuals = x.new_empty((steps - 1 if keep else 1, count, dim))
    # z_0 = 0 makes r_0 = x: the first step is one product.
    code, residual = None, tokens
    for t in range(steps):
        if code is not None:
            residual = residuals[t - 1 if keep else 0]
            torch.mm(code, matrix.t(), out=residual)
            _update(residual, tokens, None, None, -1.0, 0.0, False, False, residual)
        update = torch.mm(residual, matrix)
        out = codes[t if keep else 0]
        _update(update, code, None, None, step_size, step_size * lambd, True, False, out)
        code = out
    assert code is not None
    out = torch.mm(code, (matrix if decoder is None else decoder.to(x.dtype)).t()).view(x.shape)
    return (out, codes, residuals) if keep else (out, x.new_empty(0), x.new_empty(0))


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
    tokens, dout, matrix = _rows(x), _rows(dout), weight.to(x.dtype)
    # Sums are in the weight's dtype, so that a float32 weight beside half tokens gets a float32 sum of half products.
    total = _add_over_tokens(None, dout, codes[-1], 1.0, weight.dtype)
    ddecoder, dweight = (weight.new_empty(0), total) if decoder is None else (total, None)
    dcode = torch.mm(dout, matrix if decoder is None else decoder.to(x.dtype))
    _update(dcode, None, None, codes[-1], 1.0, 0.0, False, True, dcode)
    dx = None
    for t in range(steps - 1, 0, -1):
        dr = _scaled_product(dcode, matrix.t(), step_size)
        dweight = _add_over_tokens(dweight, residuals[t - 1], dcode, step_size, weight.dtype)
        dweight = _add_over_tokens(dweight, dr, codes[t - 1], -1.0, weight.dtype)
        _update(torch.mm(dr, matrix), dcode, None, codes[t - 1], -1.0, 0.0, False, True, dcode)
        dx = dr if dx is None else dx.add_(dr)
    dweight = _add_over_tokens(dweight, tokens, dcode, step_size, weight.dtype)
    if dx is None:
        dx = _scaled_product(dcode, matrix.t(), step_size)
    else:
        dx.addmm_(dcode, matrix.t(), alpha=step_size)
    return dx.view(x.shape), dweight, ddecoder


def _rows(t: Tensor) -> Tensor:
    """View tokens as the contiguous rows that the kernels take; copy them if they are not."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1]).contiguous()


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for what ``t`` becomes in ``dtype``: its own if that fits."""
    return t if t.dtype == dtype else torch.empty_like(t, dtype=dtype)


def _matrix(weight: Tensor, compute: torch.dtype) -> Tensor:
    """Return K = W - W^T W, accumulated in float32 and rounded once."""
    return torch.addmm(weight, weight.t(), weight, alpha=-1).to(compute)


def _residual(x: Tensor, code: Tensor, matrix: Tensor) -> Tensor:
    """Return x - code W^T."""
    residual = torch.mm(code, matrix.t())
    _update(residual, x, None, None, -1.0, 0.0, False, False, residual)
    return residual


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left @ right, scaled before it is rounded."""
    # Times zero, what is to be added is never read.
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _add_over_tokens(total: Tensor | None, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return total + scale * left^T right, in place, or begin the total in ``dtype``."""
    if total is None:
        return _scaled_product(left.t(), right, scale).to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left.t(), right, alpha=scale)
    return total.add_(_scaled_product(left.t(), right, scale))
