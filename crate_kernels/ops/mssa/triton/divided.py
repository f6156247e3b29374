"""What the symmetric backward needs first: a shift for each head, and divided gradients with their delta for each row.

The symbols of symmetric.py. The shift is the smallest L of the head, so that no h is larger than its g, and E is at
most exp(the spread of L). Where L spreads further than that leaves room for, or is so large that its rounding or that
of a score would show, the head's shift is -inf, h is g, and the main kernel takes the form of terms.py. The host does
not wait to know.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.delta import delta_of_rows
from crate_kernels.ops.mssa.triton.head import find_head, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.rows import LOG2_E

# In bits. E is then at most 2^60, and h of a gradient above 1e-19 a normal number of bf16.
SPREAD = tl.constexpr(60.0)
# Of |L|, in bits: 256 nats. Beyond, 2^-24 of a score, and of a difference that it magnifies, is 2^-15 of a weight.
HIGHEST = tl.constexpr(370.0)
_CHUNK = tl.constexpr(512)


@triton.jit
def _shift_of_head(lse_ptr, length):
    """Return the smallest L of a head in bits, or -inf where the symmetric form would not be exact."""
    low = tl.full((_CHUNK,), float("inf"), tl.float32)  # (_CHUNK,)
    high = -low
    for start in range(0, length, _CHUNK):
        offs = start + tl.arange(0, _CHUNK)
        lse = tl.load(lse_ptr + offs, mask=offs < length, other=-float("inf")) * LOG2_E  # (_CHUNK,)
        lse = tl.where(lse == lse, lse, float("inf"))  # a maximum passes over NaN
        low = tl.minimum(low, tl.where(lse == -float("inf"), float("inf"), lse))  # but rows without keys
        high = tl.maximum(high, lse)
    low, high = tl.min(low, 0), tl.max(high, 0)
    exact = (low <= high) & (high - low <= SPREAD) & (high <= HIGHEST) & (low >= -HIGHEST)
    return tl.where(exact, low, -float("inf"))


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m", "each"])
def _mssa_bwd_divide_kernel(
    g, divided, out, w, lse_ptr, dlse_ptr, delta_ptr, shift_ptr, nheads, seqlen, total, call, num_m, each,
    DELTA: tl.constexpr, HAS_DLSE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write h and delta - dlse / r of ``each`` blocks of FORM.BLOCK rows, and the shift of every head.

    DELTA is "guarded" or "weights", as in delta.py.
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK
    pid = tl.program_id(0)
    head = find_head(pid // num_m, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    lse_ptr += head.row
    delta_ptr += head.row
    shift = _shift_of_head(lse_ptr, head.length)
    if pid % num_m == 0:
        tl.store(shift_ptr + head.number, shift)
    scores = scores_of(head, seqlen, call, FORM)
    g, divided, out, w = tokens_of(head, g), tokens_of(head, divided), tokens_of(head, out), tokens_of(head, w)
    first = pid % num_m * each * BLOCK_M
    for start_m in range(first, tl.minimum(first + each * BLOCK_M, head.length), BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < head.length
        lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=-float("inf"))  # (BLOCK_M,)
        lse = tl.where(lse == -float("inf"), float("inf"), lse)  # of a row without keys, whose weights are 0
        inverse = tl.where(shift == -float("inf"), 1.0, tl.exp2(shift - lse * LOG2_E))  # (BLOCK_M,)
        g_m = tile.load(g, offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
        h = tile.rounded(tile.scale(g_m, inverse), g.ptr.dtype.element_ty)  # (BLOCK_M, HEAD_DIM)
        tile.store(divided, h, offs_m, mask_m, FORM)
        delta = delta_of_rows(g_m, h, out, w, lse_ptr, scores, start_m, BLOCK_M, FORM, DELTA)  # (BLOCK_M,)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + head.row + offs_m, mask=mask_m, other=0.0) * inverse
        tl.store(delta_ptr + offs_m, delta, mask=mask_m)
