"""What the backward of subspace attention takes from each row once, in Triton: ``delta`` and the extent of lse.

``delta_i = g_i . out_i``, except with dropout: where one weight is all, out is ``factor w_j`` rounded, the backward
subtracts delta from ``factor g_i.w_j``, and what the rounding took is multiplied by ``s_ij``. There delta is found as

    delta_i = sum_j P_ij R_ij g_i.w_j

from the products that it is subtracted from, by an online softmax, whose largest weight is exactly 1: two products a
tile more than the five of the main kernel.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.rows import mask_scores


@triton.jit
def _measured(g, at, call, start_m, BLOCK: tl.constexpr, FORM: tl.constexpr, DIMS: tl.constexpr):
    """Return sum_j P_ij R_ij g_i.w_j of the rows [start_m, start_m + BLOCK) of a head; ``g`` are theirs."""
    _, length, head, seed, _, drop_last, keep_factor = call
    offs_m = start_m + tl.arange(0, BLOCK)
    w_m = tile.load(at, offs_m, offs_m < length, DIMS)  # (BLOCK, head_dim)
    l_i = tl.zeros((BLOCK,), tl.float32)
    m_i, delta = l_i - float("inf"), l_i
    stop = tl.minimum(start_m + BLOCK, length) if FORM[0] else length
    for start_n in range(0, stop, BLOCK):
        offs_n = start_n + tl.arange(0, BLOCK)
        w_n = tile.load(at, offs_n, offs_n < length, DIMS)
        s = tile.products(w_m, w_n, FORM[4])  # (BLOCK, BLOCK)
        if FORM[3]:
            s = -s
        s = mask_scores(s, call, offs_m, offs_n, FORM)
        before = m_i
        m_i = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_i == -float("inf"), 0.0, m_i)
        shrink = tl.exp(before - base)
        p = tl.exp(s - base[:, None])
        kept = jit.keep_mask(seed, head, offs_m[:, None], offs_n[None, :], drop_last)
        d = tl.where(kept, tile.products(g, w_n, FORM[4]) * keep_factor, 0.0)
        l_i = l_i * shrink + tl.sum(p, 1)
        delta = delta * shrink + tl.sum(p * d, 1)
    return delta / tl.where(l_i == 0.0, 1.0, l_i)


# Lengths change from call to call: none of them may have kernels compiled of its own.
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
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
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
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    pid = tl.program_id(0)
    head = pid // num_m
    batch, h = head // nheads, head % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    offset = batch64 * stride_lb + h64 * stride_lh + start64
    if PRODUCTS:
        g_at = (g_ptr + batch64 * stride_gb + h64 * stride_gh + start64 * stride_gs, stride_gs, stride_gd)
        g = tile.load(g_at, offs_m, mask_m, DIMS)
        if DROPOUT:
            FORM: tl.constexpr = (CAUSAL, PADDED, DROPOUT, NEGATIVE, PRECISION)
            w_at = (w_ptr + batch64 * stride_wb + h64 * stride_wh + start64 * stride_ws, stride_ws, stride_wd)
            if PADDED:
                mask_ptr += batch64 * seqlen
            call = (mask_ptr, length, head, tl.load(seed_ptr), qk_scale, drop_last, keep_factor)
            delta = _measured(g, w_at, call, pid % num_m * BLOCK_M, BLOCK_M, FORM, DIMS)
        else:
            out_at = (out_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
            # The diagonal of a product as the main kernel makes them, not a sum in an order of its own: where a weight
            # is near 1, out is near w, and g.w - delta is what remains of two numbers that cancel.
            s = tile.products(g, tile.load(out_at, offs_m, mask_m, DIMS), PRECISION)
            own = tl.arange(0, BLOCK_M)
            delta = tl.sum(tl.where(own[:, None] == own[None, :], s, 0.0), 1)
        tl.store(delta_ptr + offset + offs_m, delta, mask=mask_m)
    base = tl.load(lse_ptr + offset + offs_m, mask=mask_m, other=0.0)
    tl.store(extent_ptr + 2 * pid.to(tl.int64), tl.min(tl.where(mask_m, base, float("inf")), 0))
    tl.store(extent_ptr + 2 * pid.to(tl.int64) + 1, tl.max(tl.where(mask_m, base, -float("inf")), 0))
