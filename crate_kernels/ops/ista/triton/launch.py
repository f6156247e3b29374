"""Sparse-coding steps on a GPU: fused products where they are half precision, the library's elsewhere.

Products of the tokens with a matrix, and passes over tensors of the tokens' size, (read, written); a pass is tokens *
dim * itemsize bytes, or with ``hidden`` in place of dim. All products fused; each that is the library's (float32, or
as ``tables.py`` has it) takes 2 reads and 1 write more where anything is added to it (``product.py``):

====================== ================= ========= =================== ===============================================
call                   products          passes    passes of hidden    what
====================== ================= ========= =================== ===============================================
forward, many tokens   1                 1, 1                          x in, y out
forward, few           2                 3, 2                          x twice, r out and in, y out
backward, many         2                 5, 2                          dy, y in, g' out; g' in, dx out; x, g' in
backward, few          5                 11, 4                         the weight is what takes the time to read
overcomplete forward   2 steps           2 s + 1, 2 s + 1, steps       s = steps - 1; codes and residuals are written
                       (of dim * hidden) s + 1                         where they are kept
overcomplete backward  4 steps           3 s + 4,  5 s + 4, steps      3 for one step; dx is added up in the last
                       (of dim * hidden) steps                         product, or past two steps by 2 reads, 1 write
====================== ================= ========= =================== ===============================================

The least is 1 product forward and 3 for training; 2 and 6 in the two-product form, to which the backward adds
the residual's, which is not kept. Beside them K = W - W^T W and its derivative, dim^3 each. The sums over all tokens,
x^T g', are the library's products: their few output tiles need its split along the tokens. Masking dy into g' first is
one pass, and lets both products of the backward read one tensor by asynchronous copies. Which form a step takes, and
whose product it is, are looked up in ``tables.py``, never timed in a call. Derivations are in ``reference.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton.launch import Table
from crate_kernels.ops.ista.triton.product import gated, library_product, product
from crate_kernels.ops.ista.triton.tables import BACKWARD_FORM, FORWARD_FORM


def forward(
    x: Tensor, weight: Tensor, step_size: float, lambd: float, nonnegative: bool, compute: torch.dtype
) -> Tensor:
    """Return y; products run in ``compute``, the residual is added in float32."""
    tokens = _rows(x)
    one = _one_product(FORWARD_FORM, tokens, 1.0)
    left, right = tokens, _matrix(weight, compute) if one else weight.to(compute)
    if not one:
        left = product(tokens, right.t(), base=tokens, scale=-1.0)
    options: dict[str, Any] = {"threshold": step_size * lambd, "nonnegative": nonnegative, "dtype": x.dtype}
    return product(left, right, base=tokens, scale=step_size, **options).view(x.shape)


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
    g = gated(dy, y, compute)
    # Rounded to half for the products, the gradient of a float32 stream is not yet what is added.
    through: dict[str, Any] = {"base": g} if compute == x.dtype else {"gated": dy, "gate": y}
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    # The one-product form spares 3 products with the tokens (of either gradient alone, 1) for 2 (1) of dim^3.
    if _one_product(BACKWARD_FORM, tokens, 2 / 3 if need_dx and need_dweight else 1.0):
        if need_dx:
            matrix = _matrix(weight, compute).t()
            dx = product(g, matrix, scale=step_size, dtype=x.dtype, **through).view(x.shape)
        if need_dweight:
            dk = library_product(tokens.to(compute).t(), g, step_size).to(weight.dtype)
            dweight = torch.addmm(dk, weight, dk + dk.t(), alpha=-1)
        return dx, dweight
    matrix = weight.to(compute)
    dr = product(g, matrix.t(), scale=step_size)
    if need_dx:
        dx = product(dr, matrix, base=dr, gated=dy, gate=y, scale=-1.0, dtype=x.dtype).view(x.shape)
    if need_dweight:
        residual = product(tokens, matrix.t(), base=tokens, scale=-1.0)
        dweight = library_product(residual.t(), g, step_size).addmm_(dr.t(), tokens.to(compute), alpha=-1)
    return dx, dweight.to(weight.dtype)


def forward_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, step_size: float, lambd: float, steps: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the codes z_1..z_steps and the residuals r_1..; the latter two empty unless ``keep``."""
    tokens, (dim, hidden) = _rows(x), weight.shape
    count, threshold = tokens.shape[0], step_size * lambd
    codes = x.new_empty((steps, count, hidden) if keep else (0,))
    residuals = x.new_empty((steps - 1, count, dim) if keep else (0,))
    matrix = weight.to(x.dtype)
    # z_0 = 0 makes r_0 = x: the first step is one product.
    code, residual = None, tokens
    for t in range(steps):
        if code is not None:
            kept = residuals[t - 1] if keep else None
            residual = product(code, matrix.t(), base=tokens, scale=-1.0, out=kept)
        kept = codes[t] if keep else None
        code = product(residual, matrix, base=code, scale=step_size, threshold=threshold, out=kept)
    assert code is not None
    out = torch.mm(code, (matrix if decoder is None else decoder.to(x.dtype)).t())
    return out.view(x.shape), codes, residuals


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
    dweight, ddecoder = _add_over_tokens(None, dout, codes[-1], 1.0, weight.dtype), weight.new_empty(0)
    dcode = product(dout, matrix if decoder is None else decoder.to(x.dtype), gate=codes[-1])
    if decoder is not None:
        ddecoder, dweight = dweight, None
    dx = None
    for t in range(steps - 1, 0, -1):
        dr = product(dcode, matrix.t(), scale=step_size)
        dweight = _add_over_tokens(dweight, residuals[t - 1], dcode, step_size, weight.dtype)
        dweight = _add_over_tokens(dweight, dr, codes[t - 1], -1.0, weight.dtype)
        dcode = product(dr, matrix, base=dcode, scale=-1.0, gate=codes[t - 1])
        dx = dr if dx is None else dx.add_(dr)
    dweight = _add_over_tokens(dweight, tokens, dcode, step_size, weight.dtype)
    return product(dcode, matrix.t(), base=dx, scale=step_size).view(x.shape), dweight, ddecoder


def _rows(t: Tensor) -> Tensor:
    """View tokens as the contiguous rows that the kernels take; copy them if they are not."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1]).contiguous()


def _one_product(table: Table, tokens: Tensor, equal: float) -> bool:
    """Whether ``tokens`` take one product; from ``equal`` times dim tokens on it is no more FLOP than two."""
    count, dim = tokens.shape
    return 100 * count >= table.config(tokens.device, dim, count, False, tokens.dtype)["ONE"] * equal * dim


def _matrix(weight: Tensor, compute: torch.dtype) -> Tensor:
    """Return K = W - W^T W, formed in weight's dtype and rounded once."""
    return torch.addmm(weight, weight.t(), weight, alpha=-1).to(compute)


def _add_over_tokens(total: Tensor | None, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return total + scale * left^T right, in place, or begin the total in ``dtype``."""
    if total is None:
        return library_product(left.t(), right, scale).to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left.t(), right, alpha=scale)
    return total.add_(library_product(left.t(), right, scale))
