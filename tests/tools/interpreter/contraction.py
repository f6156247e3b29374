"""Let Triton's interpreter fuse a product with the sum or difference that it goes into, as GPUs' compilers do.

The interpreter rounds both, a multiply-add once. Here a float32 product keeps its factors, and what adds or subtracts
it, directly, multiplies them again in float64, where their product is exact. ``tl.fma`` is fused in every test.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.interpreter import patched


def _single(*operands):
    return all(operand.dtype.scalar == tl.float32 for operand in operands)


def _product(method):
    @functools.wraps(method)
    def run(self, a, b):
        result = method(self, a, b)
        if _single(a, b):
            result.factors = a.data, b.data
        return result

    return run


def _exact(handle):
    """Return the numbers of a handle in float64, those of a product as they are before it is rounded."""
    if not hasattr(handle, "factors"):
        return handle.data.astype(np.float64)
    a, b = handle.factors
    return a.astype(np.float64) * b


def _fused(method, operation):
    @functools.wraps(method)
    def run(self, a, b):
        if not _single(a, b) or not (hasattr(a, "factors") or hasattr(b, "factors")):
            return method(self, a, b)
        # One product is fused; a second one is rounded.
        left = _exact(a)
        right = b.data.astype(np.float64) if hasattr(a, "factors") else _exact(b)
        return interpreter.TensorHandle(operation(left, right).astype(np.float32), tl.float32)

    return run


def _multiply_add(method):
    @functools.wraps(method)
    def run(self, a, b, c):
        if not _single(a, b, c):
            return method(self, a, b, c)
        exact = a.data.astype(np.float64) * b.data + c.data
        return interpreter.TensorHandle(exact.astype(np.float32), tl.float32)

    return run


def explicit():
    """Let ``tl.fma``, which asks for it, round once for as long as the context is open."""
    return patched(interpreter.InterpreterBuilder, create_fma=_multiply_add)


def computed():
    """Patch the interpreter for as long as the context is open, inside of that of bfloat16."""
    return patched(
        interpreter.InterpreterBuilder,
        create_fmul=_product,
        create_fadd=functools.partial(_fused, operation=np.add),
        create_fsub=functools.partial(_fused, operation=np.subtract),
    )
