"""Sparse-coding steps on a GPU without Triton: PyTorch's products, and everything between them fused by csrc/ista.

Every product is the library's, and every elementwise chain one pass over memory: reads of the operands that it has,
one write. Passes over tensors of the tokens' size, products apart:

====================== ====================== ==================================================================
call                   products               passes (read, written)
====================== ====================== ==================================================================
forward, many tokens   1                      2, 1: the product and x in, y out
forward, few           2                      4, 2: the residual as well
backward, many         2                      dy, y in, g' out; the product and g' in, dx out: 4, 2
backward, few          4, 3 of them for dW    6, 3: the residual as well
====================== ====================== ==================================================================

K = W - W^T W is accumulated in float32 and rounded once. Derivations are in ``reference.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels import _extension

_extension.load_cuda()
_update = torch.ops.crate_kernels_C.cuda_ista_update.default
_symmetrize = torch.ops.crate_kernels_C.cuda_ista_symmetrize.default


def forward(
    x: Tensor, weight: Tensor, step_size: float, lambd: float, nonnegative: bool, compute: torch.dtype
) -> Tensor:
    """Return y; products run in ``compute``, the residual is added in float32."""
    tokens = _rows(x)
    operand = tokens.to(compute)
    if tokens.shape[0] >= weight.shape[0]:
        product = torch.mm(operand, _matrix(weight, compute))
    else:
        matrix = weight.to(compute)
        product = torch.mm(_residual(operand, operand, matrix), matrix)
    y = _like(product, x.dtype)
    _update(product, tokens, None, None, step_size, step_size * lambd, nonnegative, False, y)
    return y.view(x.shape)


def _rows(t: Tensor) -> Tensor:
    """View tokens as the contiguous rows that the kernels take; copy them if they are not."""
    return t.reshape(-1, t.shape[-1]).contiguous()


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
