"""The factor that raises weights of fp16 tokens in a backward.

Weights of long rows, and gradients of scores far below 1, would be subnormal numbers, which have few digits, and tokens
multiply what rounding takes from them. Of weights P and a factor R of dropout, with the largest norms |g| and |w| of a
head, and its largest |dlse|,

    |A_ij| <= 2 |scale| (2 max R |g| |w| + |dlse|)

P and A are multiplied by a power of two that leaves both below 2^14, and dw by its inverse. So are the weights E of
symmetric.py, which are at most 2^4.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import largest

MAX_BITS = tl.constexpr(14)  # fp16 holds 2^15, and a weight is at most 1 but for the rounding of lse,
LARGE_SCORE = tl.constexpr(2.0**20)  # which is no longer small from this score on


@triton.jit
def norms_of_rows(of_g, w, dlse):
    """Return the largest squares of |g| and |w| of a block of rows; a gradient of lse counts as a longer g."""
    of_w = tl.maximum(tl.max(tile.row_products(w, w), 0), 1.0)  # zeros would be infinitely shorter than dlse
    longer = tl.sqrt(tl.max(of_g, 0)) + 0.5 * tl.max(tl.abs(dlse), 0) / tl.sqrt(of_w)
    return longer * longer, of_w


@triton.jit
def note_norms(norms_ptr, blocks, of_g, of_w):
    """Note the largest squares of |g| and |w| of some rows."""
    tl.store(norms_ptr, of_g)
    tl.store(norms_ptr + blocks, of_w)


@triton.jit
def norms_of(norms_ptr, blocks, count):
    """Return the largest squares that ``note_norms`` noted of ``count`` of ``blocks`` blocks of rows: a head."""
    return largest(norms_ptr, count), largest(norms_ptr + blocks, count)


@triton.jit
def factor_of(of_g, of_w, call, FORM: tl.constexpr, WEIGHT: tl.constexpr = 1.0):
    """Return the factor of a head with these squares of |g| and |w|, whose weights are at most WEIGHT."""
    bound = tl.maximum(4.0 * call.qk_scale * tl.sqrt(of_g) * tl.sqrt(of_w), WEIGHT)
    bound = bound * call.keep_factor if FORM.DROPOUT else bound
    exponent = (bound.to(tl.int32, bitcast=True) >> 23) - 126  # bound is below 2^exponent
    factor = tl.exp2(-tl.minimum(exponent - MAX_BITS, 0).to(tl.float32))
    return tl.where(call.qk_scale * of_w < LARGE_SCORE, factor, 1.0)
