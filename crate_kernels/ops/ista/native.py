"""Sparse-coding steps by PyTorch's products; csrc/ista does everything between them, each time in one pass.

CPUs multiply only the upper half of the symmetric W^T W. On GPUs these are the products of the tokens with a matrix,
and the passes over tensors of the tokens' size, (read, written), beside the reads and writes of the products:

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

GPUs take the form of fewer FLOP, which no GPU has been timed on: one product from dim tokens on. The passes are in
``steps.py``. A few tokens in float32 on a CPU are one call, csrc/ista/cpu/few.h, in the two-product form: a library's
product costs more there than its sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from crate_kernels._core import products
from crate_kernels._cuda.launch import is_gpu
from crate_kernels._native.extension import Library, library
from crate_kernels.ops.ista import cuda, op_checks, steps
from crate_kernels.ops.ista.call import ISTACall
from crate_kernels.ops.ista.cuda import UpdateTerms

# W^T W is multiplied by panels, which leaves out 5/12 of it: at most _PANELS, each at least _PANEL wide. Up to
# _MIN_DIM their calls cost more than they save.
_PANELS, _PANEL, _MIN_DIM = 6, 96, 256
# One call for all products of so many tokens of at most such a dim, in whole vectors. One thread of a Zen 5, forward /
# backward, microseconds: (8, 64) 3.4 / 6.3, by products of the library 13.2 / 35.9; (8, 384) 28 / 87, 81 / 210;
# (64, 384) 199 / 562, 385 / 1006; (64, 1024) 1361 / 8176, 2358 / 9623.
_FEW_TOKENS, _FEW_DIM, _VECTORS = 64, 1024, 16
# A pass in bfloat16 is converted to float32 up to so many multiplications of the tokens with the matrix: a product
# of the library takes 20 microseconds. Forward / backward by it: (8, 64) 9.5 / 16 by 48 / 110, (8, 384) 45 / 120 by
# 79 / 178, (8, 512) 73 / 214 by 100 / 229; (17, 512) would take 132 / 360 by 120 / 291.
_FEW_CONVERTED = 8 << 18
_FEW = 1 << 17  # up to this many elements, one call costs more than one pass


class _Cpu(steps.Engine):
    scales_late, sum_dtype = True, torch.float32

    def __init__(self, lib: Library) -> None:
        self.lib = lib
        self.update = lib.ista_update  # (product, base, gate, scale, threshold, nonnegative, out)

    def step(self, left, right, base, call, out=None):
        product = self.mm(left, right, out)
        if out is None:
            out = product if base is None else _like(product, base.dtype)
        self.update(product, base, None, call.step_size, call.threshold, call.nonnegative, out)
        return out

    def product_dtype(self, compute, rows):
        return products.fast_dtype(compute, rows)

    def one_product(self, tokens):
        count, dim = tokens.shape
        return count >= self._square(dim) * dim

    def one_product_back(self, tokens, need_dx, need_dweight):
        # The one-product form saves products with the tokens, and adds products of dim^3.
        count, dim = tokens.shape
        square = self._square(dim)
        saved, squares = (3, 1 + square) if need_dx and need_dweight else (1, square) if need_dx else (3, 1)
        return saved * count >= squares * dim

    def _square(self, dim: int) -> float:
        """Return the cost of W - W^T W, in products with dim tokens."""
        return 5 / 8 if dim > _MIN_DIM else 1.0

    def gram(self, weight, dtype):
        weight, dim = weight if weight.dtype == dtype else weight.float(), weight.shape[0]
        if weight.dtype != torch.float32 or dim <= _MIN_DIM:
            return super().gram(weight, dtype)
        weight = weight.contiguous()
        upper = torch.empty_like(weight)
        # The kernel reads the upper half by tiles of 16, so panels are cut there.
        width = max(_PANEL, -(-dim // (16 * _PANELS)) * 16)
        for start in range(0, dim, width):
            panel = slice(start, start + width)
            torch.mm(weight[:, panel].t(), weight[:, start:], out=upper[panel, start:])
        gram = torch.empty_like(upper, dtype=dtype)
        self.lib.ista_subtract_symmetric(weight, upper, gram)
        return gram

    def through_gram(self, dgram, weight):
        both = torch.empty_like(dgram, dtype=self.product_dtype(weight.dtype, weight.shape[0]))
        self.lib.ista_add_transposed(dgram, both)
        product = self.mm(weight.to(both.dtype), both)
        dweight = _like(product, weight.dtype)
        self.update(product, dgram, None, -1.0, 0.0, False, dweight)
        return dweight

    def mm(self, left, right, out=None):
        if products.should_reroute(left, right.t()):  # which has no `out`
            return products.product(left, right.t())
        return torch.mm(left, right, out=out)

    def product(self, left, right, base=None, scale=1.0, gate=None, out=None):
        # A gate takes a pass anyway, which adds the base too.
        if base is not None and ((base.dtype != torch.float32 and gate is None) or base.numel() <= _FEW):
            product = torch.addmm(base, left, right, alpha=scale, out=out)  # added before it is rounded
            base, scale = None, 1.0
        else:
            product = self.mm(left, right)
        if base is None and gate is None and scale == 1.0:
            return product
        out = product if out is None else out
        self.update(product, base, gate, scale, 0.0, False, out)
        return out

    def mask(self, dy, y, call, dtype):
        masked = torch.empty_like(dy)
        self.update(dy, None, y, 1.0, 0.0, False, masked)
        return masked

    def input_gradient(self, upstream, left, right, scale, base=None):
        product = self.product(left, right, base, 1.0 if base is None else -1.0)
        dx = product if product.dtype == upstream.masked.dtype else upstream.masked  # products read a copy of it then
        self.update(product, upstream.masked, None, scale, 0.0, False, dx)
        return dx

    def sum_over_tokens(self, left, right, scale, dtype):
        if left.dtype != torch.float32:
            return super().sum_over_tokens(left, right, scale, dtype)
        # Products of many rows are faster than scaled ones, as `mm` says: scale the smaller of factor and result.
        scale_first = scale != 1.0 and left.numel() < left.shape[1] * right.shape[1]
        product = self.mm((left * scale if scale_first else left).t(), right)
        if scale != 1.0 and not scale_first:
            product *= scale
        return product if dtype is None else steps.cast(product, dtype)

    def add_over_tokens(self, total, left, right, scale):
        if left.dtype == torch.float16:  # which may hold the product only if it is scaled first
            product, scale = steps.scaled(left.t(), right, scale), 1.0
        else:
            product = self.mm(left.t(), right)
        # One pass adds tensors of any dtypes. PyTorch's own addition to a product takes twice as long in bf16.
        self.update(product, total, None, scale, 0.0, False, total)
        return total


class _Cuda(steps.Engine):
    def step(self, left, right, base, call, out=None):
        product = self.mm(left, right, out)
        if out is None:
            out = product if base is None else _like(product, base.dtype)
        cuda.update(UpdateTerms(product, base, scale=call.step_size), call.threshold, call.nonnegative, out)
        return out

    def plus_transpose(self, square):
        both = torch.empty_like(square)
        cuda.symmetrize(square, both)
        return both

    def product(self, left, right, base=None, scale=1.0, gate=None, out=None):
        if base is None and gate is None:
            return steps.scaled(left, right, scale, out)
        product = torch.mm(left, right, out=out)
        cuda.update(UpdateTerms(product, base, gate, scale=scale), 0.0, False, product)
        return product

    def mask(self, dy, y, call, dtype):
        masked = torch.empty_like(dy, dtype=dtype)
        cuda.update(UpdateTerms(gate=y, gated=dy), 0.0, False, masked)
        return masked

    def input_gradient(self, upstream, left, right, scale, base=None):
        masked, dy, y = upstream
        product = torch.mm(left, right)
        dx = _like(product, dy.dtype)
        if base is None and masked.dtype == dy.dtype:
            terms = UpdateTerms(product, masked, scale=scale)
        else:  # dy is added in its own dtype, not as it was rounded for the products
            terms = UpdateTerms(product, base, y, dy, scale if base is None else -scale)
        cuda.update(terms, 0.0, False, dx)
        return dx

    def add_product(self, total, left, right, scale):
        if total is None:
            return steps.scaled(left, right, scale)
        return total.addmm_(left, right, alpha=scale)


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for ``t`` in ``dtype``: that of ``t`` if it has that dtype."""
    return t if t.dtype == dtype else torch.empty_like(t, dtype=dtype)


@cache
def _engine(device: torch.device) -> steps.Engine:
    return _Cuda() if is_gpu(device) else _Cpu(library())


def engine(x: Tensor) -> steps.Engine:
    """Return the engine of a step on such tokens."""
    return _engine(x.device)


def is_few(x: Tensor, weight: Tensor, call: ISTACall) -> bool:
    """Return whether all products of a pass are made at once, in float32."""
    dim = weight.shape[0]
    if is_gpu(x.device) or not x.is_cpu:
        return False
    if not (x.dtype == weight.dtype == call.compute and dim % _VECTORS == 0):
        return False
    few = 0 < x.numel() <= _FEW_TOKENS * dim and dim <= _FEW_DIM
    if call.compute != torch.bfloat16:
        return few and call.compute == torch.float32
    return few and x.numel() * dim <= _FEW_CONVERTED


def forward(x: Tensor, weight: Tensor, call: ISTACall) -> Tensor:
    """Return y; the residual is added in x's dtype or better."""
    if not is_few(x, weight, call):
        return _forward(x, weight, call)
    if x.dtype == torch.bfloat16:
        return forward(x.float(), weight.float(), call._replace(compute=torch.float32)).to(x.dtype)
    op_checks.forward(x, weight, call)
    rows = steps.flat(x).contiguous()
    y = torch.empty_like(rows)
    few = library().ista_few_fwd
    few(rows, weight.contiguous(), call.step_size, call.threshold, call.nonnegative, y)
    return y.view(x.shape)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, need_dx: bool, need_dweight: bool, call: ISTACall
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; an empty tensor for the one not needed."""
    if not is_few(x, weight, call):
        return _backward(dy, x, weight, y, need_dx, need_dweight, call)
    if x.dtype == torch.bfloat16:
        wide = dy.float(), x.float(), weight.float(), y.float()
        dx, dweight = backward(*wide, need_dx, need_dweight, call._replace(compute=torch.float32))
        return dx.to(x.dtype), dweight.to(weight.dtype)
    op_checks.backward(dy, x, weight, y)
    shape = x.shape
    dy, x, y = (steps.flat(t).contiguous() for t in (dy, x, y))
    weight = weight.contiguous()
    dx, dweight = torch.empty_like(x) if need_dx else None, torch.empty_like(weight) if need_dweight else None
    library().ista_few_bwd(dy, x, weight, y, call.step_size, dx, dweight)
    return x.new_empty(0) if dx is None else dx.view(shape), weight.new_empty(0) if dweight is None else dweight


_forward, _backward, forward_overcomplete, backward_overcomplete = steps.passes(engine)
