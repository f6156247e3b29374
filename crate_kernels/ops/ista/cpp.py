"""Sparse-coding steps on the CPU: PyTorch's products, and everything between them fused by csrc/ista.

Of the symmetric W^T W only the upper half is multiplied, elementwise work takes one pass over a product's
output and is done in place. Derivations are in ``reference.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._native import extension

extension.load()
_step = torch.ops.crate_kernels_C.ista_update.default
_subtract_symmetric = torch.ops.crate_kernels_C.ista_subtract_symmetric.default
_add_transposed = torch.ops.crate_kernels_C.ista_add_transposed.default
_linear = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None

# Where the processor has no float16 arithmetic, PyTorch's float16 product takes 30 times as long as float32's.
_FAST_FLOAT16 = _linear is not None and torch.ops.mkldnn._is_mkldnn_fp16_supported()
_PRODUCT = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16 if _FAST_FLOAT16 else torch.float32,
}
# W^T W by panels leaves out 5/12 of the product: at most so many, at least so wide. Below 256 their calls cost more.
_PANELS, _PANEL, _LEAST_DIM = 6, 96, 256
_FEW = 1 << 16  # elements, up to which one call fewer counts for more than one pass fewer


def forward(
    x: Tensor, weight: Tensor, step_size: float, lambd: float, nonnegative: bool, compute: torch.dtype
) -> Tensor:
    """Return y; products run in ``compute`` or better, the residual is added in float32."""
    product, tokens = _PRODUCT[compute], _rows(x)
    operand = tokens.to(product)
    if tokens.shape[0] >= _square(weight.shape[0]) * weight.shape[0]:
        update = _mm(operand, _matrix(weight, product))
    else:
        matrix = weight.to(product)
        update = _mm(_residual(operand, operand, matrix), matrix)
    y = _like(update, x.dtype)
    _step(update, tokens, None, step_size, step_size * lambd, nonnegative, y)
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
    product, dim = _PRODUCT[compute], x.shape[-1]
    operand = _rows(x).to(product)
    # The masked gradient becomes dx in place, when the products have read it.
    dx = torch.empty_like(_rows(dy), dtype=x.dtype)
    _step(_rows(dy), None, _rows(y), 1.0, 0.0, False, dx)
    g, dweight = dx.to(product), weight.new_empty(0)
    # How many products with the tokens one form spares, against the square ones that it has instead.
    square = _square(dim)
    spared, squares = (3, 1 + square) if need_dx and need_dweight else (1, square) if need_dx else (3, 1)
    if spared * operand.shape[0] >= squares * dim:
        # First, while the gradient is in the cache; dx must wait for the other product with it.
        update = _mm(g, _matrix(weight, product).t()) if need_dx else None
        if need_dweight:
            dmatrix = _accumulate(None, operand.t(), g, step_size)
            dweight = _through_matrix(dmatrix, weight)
        if update is not None:
            _step(update, dx, None, step_size, 0.0, False, dx)
    else:
        matrix = weight.to(product)
        dr = _mm(g, matrix.t())  # of x - x W^T, but for the step size
        if need_dweight:
            total = _accumulate(None, _residual(operand, operand, matrix).t(), g, step_size)
            dweight = _accumulate(total, dr.t(), operand, -step_size).to(weight.dtype)
        if need_dx:
            _step(_residual(dr, dr, matrix.t()), dx, None, step_size, 0.0, False, dx)
    return dx.view(x.shape) if need_dx else x.new_empty(0), dweight


def forward_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, step_size: float, lambd: float, steps: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the codes z_1..z_steps and the residuals r_1..; the latter two empty unless ``keep``."""
    tokens, product, threshold = _rows(x), _PRODUCT[x.dtype], step_size * lambd
    count, (dim, hidden) = tokens.shape[0], weight.shape
    codes = x.new_empty((steps, count, hidden) if keep else 0)
    residuals = x.new_empty((steps - 1, count, dim) if keep else 0)
    matrix, operand = weight.to(product), tokens.to(product)
    # z_0 = 0 makes r_0 = x: the first step is one product.
    code, residual = None, operand
    for t in range(steps):
        if code is not None:
            residual = _residual(operand, code, matrix)
            if keep:
                residuals[t - 1] = residual
        update = _mm(residual, matrix)
        out = codes[t] if keep and codes.dtype == product else update
        _step(update, code, None, step_size, threshold, True, out)
        code = out
        if keep and out is update:
            codes[t] = code
    assert code is not None
    out = _mm(code, (matrix if decoder is None else decoder.to(product)).t())
    return out.to(x.dtype).view(x.shape), codes, residuals


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
    product = _PRODUCT[x.dtype]
    matrix, upstream, code = weight.to(product), _rows(dout).to(product), codes[-1].to(product)
    # Sums in float32 would be as many bytes again as the products write: half weights sum in their own dtype.
    sums = product if weight.dtype == product else torch.float32
    total = _accumulate(None, upstream.t(), code, 1.0, sums)
    ddecoder = weight.new_empty(0)
    if decoder is not None:
        ddecoder, total = total.to(decoder.dtype), None
    dcode = _mm(upstream, matrix if decoder is None else decoder.to(product))
    _step(dcode, None, code, 1.0, 0.0, False, dcode)
    dx = None
    for t in range(steps - 1, -1, -1):
        residual = (residuals[t - 1] if t else _rows(x)).to(product)
        total = _accumulate(total, residual.t(), dcode, step_size, sums)
        dr = _mm(dcode, matrix.t())  # of the residual, but for the step size
        if t:
            code = codes[t - 1].to(product)
            total = _accumulate(total, dr.t(), code, -step_size)
            dcode = _residual(dcode, dr, matrix.t(), step_size, code)
        dx = dr if dx is None else dx.add_(dr)
    assert dx is not None
    assert total is not None
    dx = dx.mul_(step_size).to(x.dtype).view(x.shape)
    return dx, total.to(weight.dtype), ddecoder


def _square(dim: int) -> float:
    """Return what W - W^T W costs, in products with dim tokens."""
    return 5 / 8 if dim > _LEAST_DIM else 1.0


def _matrix(weight: Tensor, product: torch.dtype) -> Tensor:
    """Return W - W^T W, accumulated in float32 and rounded once to ``product``."""
    weight, dim = weight if weight.dtype == product else weight.float(), weight.shape[0]
    if weight.dtype != torch.float32 or dim <= _LEAST_DIM:
        return torch.addmm(weight, weight.t(), weight, alpha=-1).to(product)
    weight = weight.contiguous()
    gram = torch.empty_like(weight)
    # The kernel reads the upper half by tiles of 16, so panels are cut there.
    width = max(_PANEL, -(-dim // (16 * _PANELS)) * 16)
    for start in range(0, dim, width):
        panel = slice(start, start + width)
        torch.mm(weight[:, panel].t(), weight[:, start:], out=gram[panel, start:])
    matrix = torch.empty_like(gram, dtype=product)
    _subtract_symmetric(weight, gram, matrix)
    return matrix


def _through_matrix(dmatrix: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of W from the one of K = W - W^T W: dK - W (dK + dK^T)."""
    product = _PRODUCT[weight.dtype]
    both = torch.empty_like(dmatrix, dtype=product)
    _add_transposed(dmatrix, both)
    update = _mm(weight.to(product), both)
    dweight = _like(update, weight.dtype)
    _step(update, dmatrix, None, -1.0, 0.0, False, dweight)
    return dweight


def _residual(x: Tensor, code: Tensor, matrix: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return x - scale * code W^T, zero where there is a mask and it is zero."""
    if x.dtype == torch.float32 and x.numel() > _FEW:
        residual, base, factor = _mm(code, matrix.t()), x, -scale
    else:  # the library subtracts before it rounds
        residual, base, factor = torch.addmm(x, code, matrix.t(), alpha=-scale), None, 1.0
    if base is not None or mask is not None:
        _step(residual, base, mask, factor, 0.0, False, residual)
    return residual


def _rows(t: Tensor) -> Tensor:
    """View tokens as the contiguous rows that the kernels take; copy them if they are not."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1]).contiguous()


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for what ``t`` becomes in ``dtype``: its own if that fits."""
    return t if t.dtype == dtype else torch.empty_like(t, dtype=dtype)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the rows of ``left``.

    In float32 oneDNN is 8-13% faster than the BLAS on a Zen 4 where rows are many, and costs 12 us more a call;
    in half precision PyTorch takes it anyhow.
    """
    if left.dtype == torch.float32 and _linear is not None and left.shape[0] * right.numel() >= 1 << 24:
        return _linear(left, right.t(), None, "none", [], "")
    return torch.mm(left, right)


def _accumulate(
    total: Tensor | None, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Add scale * left @ right to ``total``, in place, or begin it in ``dtype``."""
    base = total
    if total is None:
        total = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left, right, beta=0 if base is None else 1, alpha=scale)
    # Scaled before it is rounded: a sum over all tokens may be beyond fp16 unscaled.
    product = torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)
    _step(product, base, None, 1.0, 0.0, False, total)
    return total
