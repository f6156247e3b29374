"""The backward of subspace attention in Triton: one accumulator, no atomics, bitwise deterministic.

The symbols of docs/mssa.md; g is the gradient of out, ``L`` is lse and ``dlse`` its gradient. A program owns BLOCK_J
rows j of w, as keys and as queries at once, and walks over tiles of BLOCK_I rows i. One tile of scores, which is
symmetric, has both directions in it:

    P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
    dw_j = sum_i  P_ij g_i + A_ij w_i
    A_ij = scale (P_ij (g_i.w_j - delta_i + dlse_i) + P_ji (g_j.w_i - delta_j + dlse_j))

Five products a tile, 10 seqlen^2 head_dim FLOP a head; dq, dk and dv apart would take seven products. Off the causal
diagonal one direction exists: four products after it, three before it. Memory gives g, out and lse once to the kernel
of delta.py, and w, g and two numbers a row to the main kernel; it takes dw once.

terms.py has the walk over tiles, and what ``rows``, ``call``, ``FORM`` and ``TERMS`` are.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.terms import numbers, walk


@triton.jit
def _block(
    rows,
    dw_at,
    call,
    extent,
    start_j,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TAIL_I: tl.constexpr,
    DERIVED: tl.constexpr,
    FORM: tl.constexpr,
    TERMS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head."""
    length, threshold = call[1], call[8]
    offs_j = start_j + tl.arange(0, BLOCK_J)
    mask_j = offs_j < length
    # Beyond the end the last row again: zeros would be keys whose weights can overflow.
    held_j = tl.minimum(offs_j, length - 1)
    w_j = tile.load(rows[0], held_j, held_j >= 0, DIMS)
    g_j = tile.load(rows[1], held_j, held_j >= 0, DIMS) if TERMS[2] else w_j
    l_j, delta_j, dlse_j = numbers(rows, held_j, length, TERMS)
    own = (w_j, g_j, l_j, delta_j, dlse_j)
    acc = tile.zeros(BLOCK_J, DIMS)
    if TERMS[3]:
        # Apart: the threshold is exact as a factor of the sum, and would be rounded as one of the weights.
        VALUES: tl.constexpr = (True, False, False, True, False)
        acc = walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, False, FORM, VALUES, DIMS)
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + threshold)
        if TERMS[1]:
            REST: tl.constexpr = (False, True, False, False, True)
            acc = walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, False, FORM, REST, DIMS)
    else:
        acc = walk(acc, own, rows, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    tile.store(dw_at, acc, offs_j, mask_j, DIMS)


@triton.jit
def _extent(extent_ptr, count):
    """Return the least and the largest of ``count`` pairs."""
    low = tl.full((64,), float("inf"), tl.float32)
    high = -low
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        low = tl.minimum(low, tl.load(extent_ptr + 2 * offs, mask=offs < count, other=float("inf")))
        high = tl.maximum(high, tl.load(extent_ptr + 2 * offs + 1, mask=offs < count, other=-float("inf")))
    return tl.min(low, 0), tl.max(high, 0)


# Lengths change from call to call: none of them may have kernels compiled of its own.
@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_j", "num_m", "drop_last"])
def _mssa_bwd_kernel(
    g_ptr,
    w_ptr,
    dw_ptr,
    lse_ptr,
    delta_ptr,
    dlse_ptr,
    extent_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_gd,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    stride_lb,
    stride_lh,
    nheads,
    seqlen,
    total,
    num_j,
    num_m,
    qk_scale,
    drop_last,
    keep_factor,
    scale,
    threshold,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr,
    TAIL_J: tl.constexpr,
    TAIL_I: tl.constexpr,
    DERIVED: tl.constexpr,
    VALUES: tl.constexpr,
    SCORES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SELECT: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of a block of rows; the last block of a sequence has TAIL_J rows, the last tile TAIL_I."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    FORM: tl.constexpr = (CAUSAL, PADDED, DROPOUT, NEGATIVE, PRECISION)
    TERMS: tl.constexpr = (VALUES, SCORES, PRODUCTS, SELECT, HAS_DLSE)
    tl.static_assert(BLOCK_J % BLOCK_I == 0)  # tiles after the diagonal start where it ends
    pid = tl.program_id(0)
    head, pid_j = pid // num_j, pid % num_j
    batch, h = head // nheads, head % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    at = (w_ptr + batch64 * stride_wb + h64 * stride_wh + start64 * stride_ws, stride_ws, stride_wd)
    dw_at = (dw_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
    g_at = at
    if VALUES:
        g_at = (g_ptr + batch64 * stride_gb + h64 * stride_gh + start64 * stride_gs, stride_gs, stride_gd)
    number = batch64 * stride_lb + h64 * stride_lh + start64
    dlse_at = dlse_ptr + number if HAS_DLSE else lse_ptr
    rows = (at, g_at, lse_ptr + number, delta_ptr + number, dlse_at)
    if PADDED:
        mask_ptr += batch64 * seqlen
    seed = tl.load(seed_ptr) if DROPOUT else 0
    call = (mask_ptr, length, head, seed, qk_scale, drop_last, keep_factor, scale, threshold)
    extent = (0.0, 0.0)
    if DERIVED:
        extent = _extent(extent_ptr + 2 * head.to(tl.int64) * num_m, num_m)
    start_j = pid_j * BLOCK_J
    if TAIL_J < BLOCK_J:
        if pid_j == num_j - 1:
            _block(rows, dw_at, call, extent, start_j, TAIL_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
        else:
            _block(rows, dw_at, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    elif start_j < length:
        _block(rows, dw_at, call, extent, start_j, BLOCK_J, BLOCK_I, TAIL_I, DERIVED, FORM, TERMS, DIMS)
    if PACKED:
        sequences = tl.num_programs(0) // (nheads * num_j)
        first, stop = jit.uncovered(cu_seqlens_ptr, batch, sequences, seqlen, total)
        tile.zero_rows((dw_ptr + h64 * stride_oh, stride_os, stride_od), first, stop, pid_j, num_j, BLOCK_J, DIMS)
