"""What the symmetric backward needs first: a shift for each head, and divided gradients with their delta for each row.

The symbols of symmetric.py. The shift is the smallest L of the head, so that no h is larger than its g, and E is at
most exp(the spread of L). Where L spreads further than that allows, or is so large that its rounding or that
of a score would show, the head's shift is -inf, h is g, and the main kernel takes the form of terms.py. The host does
not wait to know.

In fp16, which has 40 bits from its smallest number to its largest, the shift is the smallest L too, but at most E_BITS
bits below the largest: E is at most 2^E_BITS, and h at least g / 2^E_BITS. E is raised as P is in raised.py, by a
factor that depends on norms of the whole head. So the main kernel finds by ``raised_shift`` which form takes a head.
Of a head that the symmetric form leaves, it reads g and its delta.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.delta import delta_of_rows
from crate_kernels.ops.mssa.triton.head import find_head, largest, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.raised import factor_of, norms_of, norms_of_rows, note_norms
from crate_kernels.ops.mssa.triton.rows import LOG2_E
from crate_kernels.ops.mssa.triton.terms import shared_factor

# In bits. E is then at most 2^60, and h of a gradient above 1e-19 a normal number of bf16.
SPREAD = tl.constexpr(60.0)
# Of |L|, in bits: 256 nats. Beyond, 2^-24 of a score, and of a difference that it magnifies, is 2^-15 of a weight.
HIGHEST = tl.constexpr(370.0)
HIGHEST_FP16 = tl.constexpr(92.0)  # 2^-17 of a weight, by which fp16 is rounded to 2^-11 of it
E_BITS = tl.constexpr(4.0)  # in bits: as many norms of g are too small for h as are too large for E, or nearly
MAX_WEIGHT, MAX_RAISED = tl.constexpr(2.0**4), tl.constexpr(2.0**9)  # and then the largest factor
NORMAL_BITS = tl.constexpr(14.0)  # the smallest normal number of fp16 is 2^-14
LARGEST = tl.constexpr(65504.0)  # of fp16
FEW = tl.constexpr(16)  # keys, of which one may be all: with as few, the gradient of its row stays exact in fp16
# Of the longest g of a head, squared: h of a row is rounded to 2^-25, g to 2^-21, 2^-16 of its length, at least.
MIN_SQUARE = tl.constexpr(2.0**-10)
_CHUNK = tl.constexpr(512)


@triton.jit
def _range_of_head(lse_ptr, length):
    """Return in bits the smallest and the largest L of a head, but of rows without keys, and the largest |L|."""
    low = tl.full((_CHUNK,), float("inf"), tl.float32)  # (_CHUNK,)
    high, extent = -low, tl.zeros((_CHUNK,), tl.float32)
    for start in range(0, length, _CHUNK):
        offs = start + tl.arange(0, _CHUNK)
        inside = offs < length
        lse = tl.load(lse_ptr + offs, mask=inside, other=-float("inf")) * LOG2_E  # (_CHUNK,)
        lse = tl.where(lse == lse, lse, float("inf"))  # a maximum passes over NaN
        low = tl.minimum(low, tl.where(lse == -float("inf"), float("inf"), lse))
        high = tl.maximum(high, lse)
        extent = tl.maximum(extent, tl.where(inside, tl.abs(lse), 0.0))
    return tl.min(low, 0), tl.max(high, 0), tl.max(extent, 0)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m", "each"])
def _mssa_bwd_divide_kernel(
    g, divided, out, w, lse_ptr, dlse_ptr, delta_ptr, shift_ptr, left_delta_ptr, factor_ptr, norms_ptr,
    nheads, seqlen, total, call, num_m, each,
    DELTA: tl.constexpr, HAS_DLSE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write h and delta - dlse / r of ``each`` blocks of FORM.BLOCK rows, and the shift of every head.

    DELTA is "guarded" or "weights", as in delta.py. With norms, of fp16: also what ``raised_shift`` reads, and for
    heads that it leaves the delta of g and exp(-L).
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK
    pid = tl.program_id(0)
    head = find_head(pid // num_m, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    lse_ptr += head.row
    delta_ptr += head.row
    low, high, extent = _range_of_head(lse_ptr, head.length)
    if norms_ptr is None:
        exact = (low <= high) & (high - low <= SPREAD) & (high <= HIGHEST) & (low >= -HIGHEST)
        shift = tl.where(exact, low, -float("inf"))
    else:
        left_delta_ptr += head.row
        factor_ptr += head.row
        exact = (head.length > FEW) & (low <= high) & (high <= HIGHEST_FP16) & (low >= -HIGHEST_FP16)
        low, high = tl.where(exact, low, 0.0), tl.where(exact, high, 0.0)
        shift = tl.maximum(low, high - E_BITS)
        # The mean weight of every row, times r and the factor, is then a normal number.
        min_factor = head.length * tl.exp2(tl.minimum(shift - low, SPREAD) - NORMAL_BITS)
        shift = tl.where(exact & (min_factor <= MAX_RAISED), shift, -float("inf"))
    if pid % num_m == 0:
        tl.store(shift_ptr + head.number, shift)
        if norms_ptr is not None:
            heads = tl.num_programs(0) // num_m
            tl.store(shift_ptr + heads + head.number, min_factor)
            tl.store(shift_ptr + 2 * heads + head.number, extent / LOG2_E)
    scores = scores_of(head, seqlen, call, FORM)
    g, divided, out, w = tokens_of(head, g), tokens_of(head, divided), tokens_of(head, out), tokens_of(head, w)
    first = pid % num_m * each * BLOCK_M
    stop, max_h = tl.minimum(first + each * BLOCK_M, head.length), 0.0
    for start_m in range(first, stop, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < head.length
        lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=-float("inf"))  # (BLOCK_M,)
        lse = tl.where(lse == -float("inf"), float("inf"), lse)  # of a row without keys, whose weights are 0
        inverse = tl.where(shift == -float("inf"), 1.0, tl.exp2(shift - lse * LOG2_E))  # (BLOCK_M,)
        g_m = tile.load(g, offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
        h = tile.scale(g_m, inverse)  # (BLOCK_M, HEAD_DIM)
        if norms_ptr is not None:
            max_h = tl.maximum(max_h, tl.max(tile.row_largest(h), 0))
            h = tile.up_to(h, LARGEST)
        h = tile.rounded(h, g.ptr.dtype.element_ty)
        tile.store(divided, h, offs_m, mask_m, FORM)
        delta = delta_of_rows(g_m, h, out, w, lse_ptr, scores, start_m, BLOCK_M, FORM, DELTA)  # (BLOCK_M,)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + head.row + offs_m, mask=mask_m, other=0.0) * inverse
        tl.store(delta_ptr + offs_m, delta, mask=mask_m)
    if norms_ptr is not None:
        square, of_g, of_w = 0.0, 0.0, 1.0
        for start_m in range(first, stop, BLOCK_M):  # another walk: what both need would take registers
            offs_m = start_m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < head.length
            lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=0.0)  # (BLOCK_M,)
            tl.store(factor_ptr + offs_m, shared_factor(lse), mask=mask_m)
            dlse = tl.zeros((BLOCK_M,), tl.float32)
            if HAS_DLSE:
                dlse = tl.load(dlse_ptr + head.row + offs_m, mask=mask_m, other=0.0)
            g_m = tile.load(g, offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
            squares = tile.row_products(g_m, g_m)  # (BLOCK_M,)
            more_g, more_w = norms_of_rows(squares, tile.load(w, offs_m, mask_m, FORM), dlse)
            of_g, of_w = tl.maximum(of_g, more_g), tl.maximum(of_w, more_w)
            square = tl.maximum(square, tl.max(squares, 0))
            delta = delta_of_rows(g_m, g_m, out, w, lse_ptr, scores, start_m, BLOCK_M, FORM, DELTA)  # (BLOCK_M,)
            tl.store(left_delta_ptr + offs_m, delta, mask=mask_m)
        blocks = tl.num_programs(0)
        note_norms(norms_ptr + pid, blocks, of_g, of_w)
        tl.store(norms_ptr + 2 * blocks + pid, tl.where(max_h <= LARGEST, square, float("inf")))


class RaisedShift(NamedTuple):
    """What the main kernel finds of a head in fp16."""

    shift: tl.tensor  # which leaves E times its factor; -inf where the symmetric form would not be exact
    raised: tl.tensor  # the factor of E
    raised_left: tl.tensor  # that of P in the other form
    extent: tl.tensor  # the largest |L|


@triton.jit
def raised_shift(shift_ptr, norms_ptr, head, blocks, num_m, call, FORM: tl.constexpr):
    """Return whether the symmetric form takes an fp16 head, and what either form needs."""
    number = head.number.to(tl.int64)
    heads = blocks // num_m
    shift, min_factor = tl.load(shift_ptr + number), tl.load(shift_ptr + heads + number)
    extent = tl.load(shift_ptr + 2 * heads + number)
    of_g, of_w = norms_of(norms_ptr + number * num_m, blocks, num_m)
    square = largest(norms_ptr + 2 * blocks + number * num_m, num_m)
    raised = factor_of(of_g, of_w, call, FORM, MAX_WEIGHT)
    exact = (raised >= min_factor) & (square >= MIN_SQUARE) & (square < float("inf"))
    bits = ((raised.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
    shift = tl.where(exact, shift - bits, -float("inf"))
    return RaisedShift(shift, raised, factor_of(of_g, of_w, call, FORM), extent)
