"""Let Triton's interpreter multiply matrices as tensor cores do, and on every machine alike.

The interpreter calls NumPy's product, whose order of addition depends on the processor, the shape and which operand
comes first. Kernels rest on products that give a score the same bits wherever they meet it: in tiles of any shape, in
the forward and in the backward, as s_ij and as s_ji. Here channels are added up in their order: 16-bit operands in
groups of 16, as in mma and wgmma instructions, each group as if exact, and rounded to the float32 of the accumulator;
float32 operands one by one, by fused multiply-adds.
"""

import functools
from contextlib import contextmanager

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.interpreter.bfloat16 import numbers

GROUP = 16  # channels per instruction, of 16-bit operands


def product(a, b, total, group):
    """Return ``total + a b`` for float32 totals (..., M, N), rounded after each ``group`` of channels."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for first in range(0, a.shape[-1], group):
        channels = slice(first, first + group)
        total = (total + a[..., channels] @ b[..., channels, :]).astype(np.float32)
    return total


def _dot(method):
    @functools.wraps(method)
    def run(self, a, b, total, *rest):
        if total.dtype.scalar != tl.float32:
            return method(self, a, b, total, *rest)
        group = 1 if a.dtype.scalar == tl.float32 == b.dtype.scalar else GROUP
        return interpreter.TensorHandle(product(numbers(a), numbers(b), total.data, group), tl.float32)

    return run


@contextmanager
def computed():
    """Patch the interpreter for as long as the context is open, inside of that of bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_dot", _dot(builder.create_dot))
        yield
