"""Two numbers that the backward of subspace attention needs first: ``delta`` per row, the extent of lse per block.

``delta_i = g_i . out_i``, except with dropout: where one weight is all, out is ``factor w_j`` rounded, the backward
subtracts delta from ``factor g_i.w_j``, and what the rounding took is multiplied by ``s_ij``. There delta is found as

    delta_i = sum_j P_ij R_ij g_i.w_j

from the products that it is subtracted from, by an online softmax, whose largest weight is exactly 1: two products per
tile more than the five of the main kernel.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.head import (
    Form,
    find_head,
    offset_of,
    scores_of,
    signed_products,
    tokens_of,
)
from crate_kernels.ops.mssa.triton.rows import mask_scores


@triton.jit
def _delta_of_weights(g, w, scores, start_m, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Return sum_j P_ij R_ij g_i.w_j of the rows [start_m, start_m + BLOCK) of a head; ``g`` are theirs."""
    length = scores.length
    offs_m = start_m + tl.arange(0, BLOCK)
    w_m = tile.load(w, offs_m, offs_m < length, FORM.DIMS)  # (BLOCK, HEAD_DIM)
    l_i = tl.zeros((BLOCK,), tl.float32)
    m_i, delta = l_i - float("inf"), l_i
    stop = tl.minimum(start_m + BLOCK, length) if FORM.CAUSAL else length
    for start_n in range(0, stop, BLOCK):
        offs_n = start_n + tl.arange(0, BLOCK)
        w_n = tile.load(w, offs_n, offs_n < length, FORM.DIMS)  # (BLOCK, HEAD_DIM)
        s = mask_scores(signed_products(w_m, w_n, FORM), scores, offs_m, offs_n, FORM)  # (BLOCK, BLOCK)
        before = m_i
        m_i = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_i == -float("inf"), 0.0, m_i)
        shrink = tl.exp(before - base)
        p = tl.exp(s - base[:, None])
        kept = jit.keep_mask(scores.seed, scores.head, offs_m[:, None], offs_n[None, :], scores.drop_last)
        d = tl.where(kept, tile.products(g, w_n, FORM.PRECISION) * scores.keep_factor, 0.0)
        l_i = l_i * shrink + tl.sum(p, 1)
        delta = delta * shrink + tl.sum(p * d, 1)
    return delta / tl.where(l_i == 0.0, 1.0, l_i)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_m", "drop_last"])
def _mssa_bwd_delta_kernel(
    g_ptr,
    out_ptr,
    w_ptr,
    lse_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    delta_ptr,
    extent_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    stride_lb,
    stride_lh,
    nheads,
    seqlen,
    total,
    num_m,
    qk_scale,
    drop_last,
    keep_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write delta of every row, and the least and the largest lse of every block of BLOCK_M."""
    FORM: tl.constexpr = Form(
        tile.split_dims(HEAD_DIM), PRECISION, BLOCK_M, BLOCK_M, "online", CAUSAL, PADDED, DROPOUT, NEGATIVE
    )
    pid = tl.program_id(0)
    start_m = pid % num_m * BLOCK_M
    head = find_head(pid // num_m, nheads, seqlen, total, cu_seqlens_ptr, PACKED)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < head.length
    offset = offset_of(head, stride_lb, stride_lh)
    if PRODUCTS:
        g = tokens_of(head, g_ptr, stride_gb, stride_gh, stride_gs, stride_gd)
        g_m = tile.load(g, offs_m, mask_m, FORM.DIMS)  # (BLOCK_M, HEAD_DIM)
        if DROPOUT:
            w = tokens_of(head, w_ptr, stride_wb, stride_wh, stride_ws, stride_wd)
            scores = scores_of(head, seqlen, qk_scale, mask_ptr, seed_ptr, drop_last, keep_factor, FORM)
            delta = _delta_of_weights(g_m, w, scores, start_m, BLOCK_M, FORM)
        else:
            out = tokens_of(head, out_ptr, stride_ob, stride_oh, stride_os, stride_od)
            # Take the diagonal of a product as the main kernel's: where a weight is near 1, out is near w, g.w - delta
            # cancels, and a sum in another order would leave its rounding.
            s = tile.products(g_m, tile.load(out, offs_m, mask_m, FORM.DIMS), PRECISION)  # (BLOCK_M, BLOCK_M)
            own = tl.arange(0, BLOCK_M)
            delta = tl.sum(tl.where(own[:, None] == own[None, :], s, 0.0), 1)
        tl.store(delta_ptr + offset + offs_m, delta, mask=mask_m)
    base = tl.load(lse_ptr + offset + offs_m, mask=mask_m, other=0.0)
    tl.store(extent_ptr + 2 * pid.to(tl.int64), tl.min(tl.where(mask_m, base, float("inf")), 0))
    tl.store(extent_ptr + 2 * pid.to(tl.int64) + 1, tl.max(tl.where(mask_m, base, -float("inf")), 0))
