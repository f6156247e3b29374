"""Quotients of sums: by a division, by a reciprocal for many numbers, or by the instruction alone."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.0e38)  # finite: infinity times 0 is no number


@triton.jit
def reciprocal(x, DIMS: tl.constexpr):
    """Return 1 / x of positive numbers far from the ends of fp32's range, with an error of one unit in the last place.

    It is one instruction; a division, which scales numbers at the ends of the range, is eight, no more exact.
    """
    if DIMS.PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def inverse_of(c, DIMS: tl.constexpr):
    """Return 1 / c and, of float32 tokens, what its rounding left: for ``ratio_of``."""
    inverse = 1.0 / c
    if DIMS.WIDE:
        return inverse, tl.fma(-tl.minimum(c, LARGEST), inverse, 1.0) * inverse
    else:
        return inverse, inverse


@triton.jit
def ratio_of(x, inverse, rest, DIMS: tl.constexpr):
    """Return x / c from ``inverse_of(c)``: of float32 tokens exactly 1 where x is c; others have no such digits."""
    if DIMS.WIDE:
        return tl.fma(x, inverse, x * rest)
    else:
        return x * inverse


@triton.jit
def quotient_of(x, c, DIMS: tl.constexpr):
    """Return x / c of a positive c, with its error of the last place taken away for float32 tokens alone."""
    inverse = reciprocal(c, DIMS)
    quotient = x * inverse
    if DIMS.WIDE:
        quotient = tl.fma(tl.fma(-quotient, tl.minimum(c, LARGEST), x), inverse, quotient)
    return quotient
