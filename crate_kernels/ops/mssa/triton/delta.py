"""Numbers that the backward of subspace attention needs first: ``delta`` and exp(-lse) per row, max |lse| per block.

``delta_i = g_i . out_i``, except with dropout: where one weight is all, out is ``factor w_j`` rounded, the backward
subtracts delta from ``factor g_i.w_j``, and what the rounding took is multiplied by ``s_ij``. There delta is found as

    delta_i = sum_j P_ij R_ij g_i.w_j

from the products that it is subtracted from, by an online softmax, whose largest weight is exactly 1: two products per
tile more than the five of the main kernel. So it is of fp32 tokens with few keys, and of fp16 ones that a tiny scale
multiplies: they may be so large that g_i . out_i is mostly the rounding of out. Of other tokens so are the rows where
that rounding would show in dw, by blocks: csrc/mssa/cpu/row_stats.h has the measure of it.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton.jit import rounded_product
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import allowed, find_head, kept, scores_of, signed_products, tokens_of
from crate_kernels.ops.mssa.triton.raised import norms_of_rows, note_norms
from crate_kernels.ops.mssa.triton.rows import LOG2_E, empty_state, walk_keys
from crate_kernels.ops.mssa.triton.terms import shared_factor


@triton.jit
def _masked_scores(a, b, scores, queries, keys, FORM: tl.constexpr):
    """Return scores as the main kernel rounds them, -inf where a row may not see a key."""
    s = rounded_product(signed_products(a, b, FORM), scores.call.qk_scale)
    return tl.where(allowed(scores, queries, keys, FORM), s, -float("inf"))


@triton.jit
def _delta_of_weights(g, w, scores, start_m, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Return sum_j P_ij R_ij g_i.w_j of the rows [start_m, start_m + BLOCK) of a head; ``g`` are theirs."""
    length = scores.length
    offs_m = start_m + tl.arange(0, BLOCK)
    w_m = tile.load(w, offs_m, offs_m < length, FORM)  # (BLOCK, HEAD_DIM)
    l_i = tl.zeros((BLOCK,), tl.float32)
    m_i, delta = l_i - float("inf"), l_i
    stop = tl.minimum(start_m + BLOCK, length) if FORM.CAUSAL else length
    for start_n in range(0, stop, BLOCK):
        offs_n = start_n + tl.arange(0, BLOCK)
        w_n = tile.load(w, offs_n, offs_n < length, FORM)  # (BLOCK, HEAD_DIM)
        s = _masked_scores(w_m, w_n, scores, offs_m[:, None], offs_n[None, :], FORM)  # (BLOCK, BLOCK)
        before = m_i
        m_i = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_i == -float("inf"), 0.0, m_i)
        shrink = tl.exp2((before - base) * LOG2_E)
        p = tl.exp2((s - base[:, None]) * LOG2_E)
        d = tile.products(g, w_n, FORM) * scores.call.keep_factor  # (BLOCK, BLOCK)
        if FORM.DROPOUT:
            d = tl.where(kept(scores, offs_m[:, None], offs_n[None, :]), d, 0.0)
        l_i = l_i * shrink + tl.sum(p, 1)
        delta = delta * shrink + tl.sum(p * d, 1)
    return delta / tl.where(l_i == 0.0, 1.0, l_i)


# The rounding of out that dw bears, in units of 0.2 eps and of the largest |g| of a block.
_MAX_ROUNDING = tl.constexpr(2.0)
_BF16, _FP16, _FP32 = tl.constexpr(0.2 * 2**-7), tl.constexpr(0.2 * 2**-10), tl.constexpr(0.2 * 2**-23)


@triton.jit
def _guarded(delta, g, h, out, w, lse, scores, start_m, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Return ``delta``, of ``h``, of a block of rows, summed over their weights where the rounding of out would show.

    What shows is in proportion to ``g``, of which h are multiples by row.
    """
    max_rounding = tl.max(tile.row_largest(g), 0) * _MAX_ROUNDING
    rounding = scores.call.qk_scale * tile.row_largest(out) * tl.sqrt(tile.row_squares(g, out))
    if tl.max(rounding, 0) > max_rounding:
        offs_m = start_m + tl.arange(0, BLOCK)
        w_m = tile.load(w, offs_m, offs_m < scores.length, FORM)  # (BLOCK, HEAD_DIM)
        shows = rounding > max_rounding
        if not FORM.PADDED:
            # Where a row's own weight is nearly all, out is its token.
            own = tile.row_products(w_m, w_m) * scores.call.qk_scale  # (BLOCK,)
            rest = tl.maximum(lse - (-own if FORM.NEGATIVE else own), 0.0) + tl.abs(lse) * 2.0**-23
            unit = _BF16 if w_m[0].dtype == tl.bfloat16 else _FP16 if w_m[0].dtype == tl.float16 else _FP32
            shows = shows & (2.0 * rest * rounding > max_rounding * unit)
        if tl.max(shows.to(tl.int32), 0) > 0:
            delta = tl.where(shows, _delta_of_weights(h, w, scores, start_m, BLOCK, FORM), delta)
    return delta


@triton.jit
def delta_of_rows(
    g, h, out, w, lse_ptr, scores, start_m, BLOCK: tl.constexpr, FORM: tl.constexpr, DELTA: tl.constexpr
):  # fmt: skip
    """Return delta of the rows [start_m, start_m + BLOCK) of a head by DELTA; ``h`` are rows of ``g``, or multiples."""
    if DELTA == "weights":
        return _delta_of_weights(h, w, scores, start_m, BLOCK, FORM)
    else:
        offs_m = start_m + tl.arange(0, BLOCK)
        mask_m = offs_m < scores.length
        o_m = tile.load(out, offs_m, mask_m, FORM)  # (BLOCK, HEAD_DIM)
        # Take the diagonal of a product as the main kernel's: where a weight is near 1, out is near w, g.w - delta
        # cancels, and a sum in another order would leave its rounding.
        s = tile.products(h, o_m, FORM)  # (BLOCK, BLOCK)
        own = tl.arange(0, BLOCK)
        delta = tl.sum(tl.where(own[:, None] == own[None, :], s, 0.0), 1)
        if DELTA == "guarded":
            lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=0.0)  # (BLOCK,)
            delta = _guarded(delta, g, h, o_m, w, lse, scores, start_m, BLOCK, FORM)
        return delta


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m"])
def _mssa_bwd_delta_kernel(
    g, out, w, lse_ptr, factor_ptr, delta_ptr, extent_ptr, norms_ptr, dlse_ptr, nheads, seqlen, total, call, num_m,
    DELTA: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write exp(-lse) of every row, the largest |lse| of every FORM.BLOCK rows, and delta by DELTA, unless that is "".

    Without lse, delta alone. "out": the product of g and out; "weights": the sum over the row's weights; "guarded": the
    product, or where its rounding would show the sum. "threshold":
    what a forward compares its weights with, in place of delta, and the maximum that they are below, in place of
    exp(-lse). With norms, those of raised.py too; "passed": of g, but no delta, which counts as a gradient of lse.
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK
    pid = tl.program_id(0)
    start_m = pid % num_m * BLOCK_M
    head = find_head(pid // num_m, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < head.length
    if DELTA == "threshold":
        scores = scores_of(head, seqlen, call, FORM)
        w_m = tile.load(tokens_of(head, w), offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
        state = empty_state(BLOCK_M, FORM)
        _, m_i, l_i = walk_keys(state, w_m, tokens_of(head, w), scores, start_m, "statistics", BLOCK_M, FORM)
        tl.store(factor_ptr + head.row + offs_m, m_i, mask=mask_m)
        tl.store(delta_ptr + head.row + offs_m, l_i * call.threshold, mask=mask_m)
        return
    if norms_ptr is not None:
        zero = tl.zeros((BLOCK_M,), tl.float32)
        of_g, dlse = zero, zero
        if DELTA != "":
            g_m = tile.load(tokens_of(head, g), offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
            of_g = tile.row_products(g_m, g_m)
        if dlse_ptr is not None:
            dlse = tl.load(dlse_ptr + head.row + offs_m, mask=mask_m, other=0.0)
        w_m = tile.load(tokens_of(head, w), offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
        of_g, of_w = norms_of_rows(of_g, w_m, dlse)
        note_norms(norms_ptr + pid, tl.num_programs(0), of_g, of_w)
    if DELTA != "" and DELTA != "passed":
        g_m = tile.load(tokens_of(head, g), offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
        scores = scores_of(head, seqlen, call, FORM)
        lse_at = lse_ptr + head.row if DELTA == "guarded" else delta_ptr
        delta = delta_of_rows(
            g_m, g_m, tokens_of(head, out), tokens_of(head, w), lse_at, scores, start_m, BLOCK_M, FORM, DELTA
        )
        tl.store(delta_ptr + head.row + offs_m, delta, mask=mask_m)
    if lse_ptr is not None:
        base = tl.load(lse_ptr + head.row + offs_m, mask=mask_m, other=0.0)  # (BLOCK_M,)
        tl.store(factor_ptr + head.row + offs_m, shared_factor(base), mask=mask_m)
        tl.store(extent_ptr + pid, tl.max(tl.abs(base), 0))
