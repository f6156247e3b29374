"""Let Triton's interpreter compute bfloat16 as a GPU does.

The interpreter keeps the 16 bits of a bfloat16 number in a uint16, and computes with those integers as if they were the
numbers. Here each operation reads them as float32, computes there and rounds the result once, to nearest and ties to
even. Products of ``tl.dot`` are exact in float32 and added up there.
"""

import functools
from contextlib import contextmanager

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.tools.interpreter import patched

_ARITHMETIC = (
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "precise_divf", "fma", "clampf"),
    *("minimumf", "minnumf", "maximumf", "maxnumf"),
    *("cos", "sin", "exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "erf", "floor", "ceil"),
)
_COMPARISONS = tuple(f"fcmp{how}{which}" for how in "OU" for which in ("LT", "GT", "LE", "GE", "EQ", "NE"))
_CASTS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp")


def encode(values):
    """Round float32 numbers to bfloat16 and return their bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # Rounding up could carry the bits of a NaN into those of an infinity.
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def decode(bits):
    """Return the numbers, as float32, of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def numbers(handle):
    """Return the numbers of a tensor, of whatever dtype, as an array."""
    return decode(handle.data) if _is_bfloat16(handle) else handle.data


def _is_bfloat16(value):
    return isinstance(value, interpreter.TensorHandle) and value.dtype.scalar == tl.bfloat16


def _wide(value):
    return interpreter.TensorHandle(decode(value.data), tl.float32) if _is_bfloat16(value) else value


def _narrow(value):
    return interpreter.TensorHandle(encode(value.data.astype(np.float32)), tl.bfloat16)


def _arithmetic(method):
    """Compute with float32 and round, if an operand is bfloat16."""

    @functools.wraps(method)
    def run(self, *operands):
        if not any(map(_is_bfloat16, operands)):
            return method(self, *operands)
        return _narrow(method(self, *map(_wide, operands)))

    return run


def _comparison(method):
    @functools.wraps(method)
    def run(self, *operands):
        return method(self, *map(_wide, operands))

    return run


def _cast(method):
    """Cast to and from bfloat16 through float32; a mode that rounds towards zero drops the last bits."""

    @functools.wraps(method)
    def run(self, source, to, *rounding):
        if to.scalar != tl.bfloat16:
            if not _is_bfloat16(source):
                return method(self, source, to, *rounding)
            source = _wide(source)
            return source if to.scalar == tl.float32 else self.cast_impl(source, to)
        wide = source if source.dtype.scalar == tl.float32 else self.cast_impl(_wide(source), tl.float32)
        if any("RTZ" in str(mode) for mode in rounding):
            bits = np.ascontiguousarray(wide.data).view(np.uint32) >> 16
            return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)
        return _narrow(wide)

    return run


def _dot(method):
    """Multiply and add up in the accumulator's float32, of which a bfloat16 operand's numbers are a part."""

    @functools.wraps(method)
    def run(self, a, b, d, *rest):
        result = method(self, _wide(a), _wide(b), _wide(d), *rest)
        return _narrow(result) if _is_bfloat16(d) else result

    return run


def _refused(method):
    """Refuse a sum in bfloat16: it rounds at each step, in an order that is the compiler's."""

    @functools.wraps(method)
    def run(self, *inputs):
        if any(_is_bfloat16(one.handle) for one in inputs[0 if isinstance(inputs[0], tuple) else slice(None)]):
            raise TypeError("a sum or scan of bfloat16 rounds at each step: convert to float32 first")
        return method(self, *inputs)

    return run


def _constant(self, value):
    return interpreter.TensorHandle(encode(np.array([value], dtype=np.float32)), tl.bfloat16)


@contextmanager
def computed():
    """Patch the interpreter for as long as the context is open."""
    builder = interpreter.InterpreterBuilder
    wrappers = {
        **dict.fromkeys(_ARITHMETIC, _arithmetic),
        **dict.fromkeys(_COMPARISONS, _comparison),
        **dict.fromkeys(_CASTS, _cast),
        "dot": _dot,
    }
    # fneg is there from Triton 3.8 on.
    known = {f"create_{name}": wrapper for name, wrapper in wrappers.items() if hasattr(builder, f"create_{name}")}
    with pytest.MonkeyPatch.context() as patch, patched(builder, **known):
        patch.setattr(builder, "get_bf16", _constant, raising=False)
        for scan in (interpreter.ReduceOps, interpreter.ScanOps):
            patch.setattr(scan, "apply_impl", _refused(scan.apply_impl))
        yield
