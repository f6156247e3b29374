"""Let Triton's interpreter spread a comparison of scalars over a tile as a mask.

It spreads it as integers, and from Triton 3.9 on its loads and stores take a mask of bools alone.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.interpreter import patched


def _splat(method):
    @functools.wraps(method)
    def run(self, to, scalar):
        if to.scalar != tl.int1:
            return method(self, to, scalar)
        return interpreter.TensorHandle(np.full(to.shape, scalar.data, dtype=bool), tl.int1)

    return run


def spread():
    """Patch the interpreter for as long as the context is open."""
    return patched(interpreter.InterpreterBuilder, create_splat=_splat)
