"""Let Triton's interpreter multiply matrices as tensor cores do, and on every machine alike.

The interpreter calls NumPy's product, whose order of addition depends on the processor, the shape and which operand
comes first. Kernels rest on products that give a score the same bits wherever they meet it: in tiles of any shape, in
the forward and in the backward, as s_ij and as s_ji. Here, as in mma and wgmma instructions, channels are added up in
groups of 16, in their order, each group as if exact, and rounded to the float32 of the accumulator. A GPU rounds after
each channel of float32, but there eager's product does so too; on a CPU it is nearer to these groups.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.interpreter import patched
from tests.tools.interpreter.bfloat16 import numbers

GROUP = 16  # channels


def product(a, b, total):
    """Return ``total + a b`` for float32 totals (..., M, N)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for first in range(0, a.shape[-1], GROUP):
        channels = slice(first, first + GROUP)
        total = (total + a[..., channels] @ b[..., channels, :]).astype(np.float32)
    return total


def _dot(method):
    @functools.wraps(method)
    def run(self, a, b, total, *rest):
        if total.dtype.scalar != tl.float32:
            return method(self, a, b, total, *rest)
        return interpreter.TensorHandle(product(numbers(a), numbers(b), total.data), tl.float32)

    return run


def computed():
    """Patch the interpreter for as long as the context is open, inside of that of bfloat16."""
    return patched(interpreter.InterpreterBuilder, create_dot=_dot)
