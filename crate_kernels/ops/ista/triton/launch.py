"""Sparse-coding steps on a GPU: fused products in half precision, the library's elsewhere.

The table counts products of the tokens with a matrix, and passes over tensors of the tokens' size, (read, written). A
pass is tokens * dim * itemsize bytes, or with ``hidden`` in place of dim. It is for fused products; each product of the
library (float32, or by ``tables.py``) takes 2 reads and 1 write more where anything is added to it (``product.py``):

====================== ================= ========= =================== ===============================================
call                   products          passes    passes of hidden    what
====================== ================= ========= =================== ===============================================
forward, many tokens   1                 1, 1                          x in, y out
forward, few           2                 3, 2                          x twice, r out and in, y out
backward, many         2                 5, 2                          dy, y in, g' out; g' in, dx out; x, g' in
backward, few          5                 11, 4                         reading the weight takes the time
overcomplete forward   2 steps           2 s + 1, 2 s + 1, steps       s = steps - 1; codes and residuals are written
                       (of dim * hidden) s + 1                         where they are kept
overcomplete backward  4 steps           3 s + 4,  5 s + 4, steps      3 for one step; dx is added up in the last
                       (of dim * hidden) steps                         product, or past two steps by 2 reads, 1 write
====================== ================= ========= =================== ===============================================

The minimum is 1 product forward and 3 for training; 2 and 6 in the two-product form, whose backward computes the
residual again rather than keep it. Beside them K = W - W^T W and its derivative take dim^3 each. The sums over all
tokens, x^T g', are the library's products: their few output tiles need its split along the tokens. Masking dy into g'
first is one pass, and lets both products of the backward read one tensor by asynchronous copies. The form of a step and
the way of a product are looked up in ``tables.py``, never timed in a call. The passes are in ``steps.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._triton.table import Table
from crate_kernels.ops.ista import steps
from crate_kernels.ops.ista.triton.product import Epilogue, gated, product
from crate_kernels.ops.ista.triton.tables import BACKWARD_FORM, FORWARD_FORM

_MAX_FLOAT32 = torch.finfo(torch.float32).max  # of the numbers that a kernel takes


class _TritonEngine(steps.Engine):
    def operand(self, tokens, dtype):
        return tokens  # rounded as the kernel loads them

    def one_product(self, tokens):
        return _one_product(FORWARD_FORM, tokens, 1.0)

    def one_product_back(self, tokens, need_dx, need_dweight):
        return _one_product(BACKWARD_FORM, tokens, 2 / 3 if need_dx and need_dweight else 1.0)

    def gram(self, weight, dtype):
        if weight.dtype == dtype:
            return super().gram(weight, dtype)
        return _in_halves(weight.t(), weight, weight, dtype)

    def through_gram(self, dgram, weight):
        if weight.dtype == dgram.dtype:
            return super().through_gram(dgram, weight)
        base = dgram.to(weight.dtype)
        return _in_halves(weight, self.plus_transpose(base), base, dgram.dtype, weight.dtype)

    def step(self, left, right, base, call, out=None):
        epilogue = Epilogue(
            call.step_size, base, threshold=min(call.threshold, _MAX_FLOAT32), nonnegative=call.nonnegative
        )
        return product(left, right, epilogue, out, None if base is None else base.dtype)

    def product(self, left, right, base=None, scale=1.0, gate=None, out=None):
        return product(left, right, Epilogue(scale, base, gate=gate), out)

    def mask(self, dy, y, call, dtype):
        return gated(dy, y, dtype)

    def input_gradient(self, upstream, left, right, scale, base=None):
        masked, dy, y = upstream
        if base is None and masked.dtype == dy.dtype:
            return product(left, right, Epilogue(scale, masked))
        # dy is added in its own dtype, not as it was rounded for the products.
        return product(left, right, Epilogue(scale if base is None else -scale, base, dy, y), dtype=dy.dtype)

    def add_product(self, total, left, right, scale):
        return product(left, right, Epilogue(scale, total))


def _in_halves(
    left: Tensor, right: Tensor, base: Tensor, half: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """Return base - left @ right, of float32 matrices, by products of ``half`` in the tensor cores; rounded once.

    A number is the sum of two halves, a + b. Of (a + b)(c + d) only b d is left out, 2^-16 of the product in bfloat16:
    the three others are one product of three times the terms.
    """
    (a, b), (c, d) = (_halves(each, half) for each in (left, right))
    rows, columns = torch.cat((a, a, b), 1), torch.cat((c, d, c), 0)
    return product(rows, columns, Epilogue(-1.0, base.contiguous()), dtype=dtype, fused=True)


def _halves(t: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into a rounded one and the rounded rest."""
    large = t.to(half)
    return large, (t - large).to(half)


def _one_product(table: Table, tokens: Tensor, equal: float) -> bool:
    """Return whether ``tokens`` take one product; from ``equal`` times dim tokens on it is no more FLOP than two."""
    count, dim = tokens.shape
    return 100 * count >= table.config(tokens.device, dim, count, False, tokens.dtype)["ONE"] * equal * dim


_engine = _TritonEngine()


def engine(x: Tensor) -> steps.Engine:
    """Return the engine of a step."""
    return _engine


forward, backward, forward_overcomplete, backward_overcomplete = steps.passes(engine)
