"""The forward of subspace attention in Triton: a tile of w, once on chip, is both key and value.

The symbols of docs/mssa.md, ``s_ij = scale * w_i . w_j``. A program owns BLOCK_M rows i and walks over tiles of
BLOCK_N keys j: two products a tile, 4 seqlen^2 head_dim FLOP a head (half of it when causal). Memory gives w once, and
once more to ``_mssa_norms_kernel`` where the softmax is bounded; it takes out and lse once. rows.py has the
walk and the two forms of the softmax, pairs.py the form for short sequences that finds each score once.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.rows import attend_rows, norms


@triton.jit
def _largest(top_ptr, count):
    """Return the largest of ``count`` numbers, none of which is negative."""
    top = tl.zeros((64,), tl.float32)
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        top = tl.maximum(top, tl.load(top_ptr + offs, mask=offs < count, other=0.0))
    return tl.max(top, 0)


# Lengths change from call to call: none of them may have kernels compiled of its own.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m"])
def _mssa_norms_kernel(
    w_ptr,
    cu_seqlens_ptr,
    top_ptr,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    nheads,
    seqlen,
    total,
    num_m,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the largest n of every block of BLOCK_M rows to top (heads, num_m); w is read once."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    pid = tl.program_id(0)
    head = pid // num_m
    batch, h = head // nheads, head % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    offset = batch.to(tl.int64) * stride_wb + h.to(tl.int64) * stride_wh + start.to(tl.int64) * stride_ws
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tile.load((w_ptr + offset, stride_ws, stride_wd), offs_m, offs_m < length, DIMS)
    tl.store(top_ptr + pid, tl.max(norms(w, qk_scale), 0))


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "nheads", "seqlen", "total", "num_m", "drop_last"])
def _mssa_fwd_kernel(
    w_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    top_ptr,
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
    num_m,
    qk_scale,
    drop_last,
    factor,
    threshold,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_M: tl.constexpr,
    TAIL_N: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write out and lse of a block of rows, or, WHOLE, of all rows of a head one block after the other.

    The last block has TAIL_M rows, and the last keys come in tiles of TAIL_N: 197 rows cost 208 and not 256.
    """
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    FORM: tl.constexpr = (CAUSAL, PADDED, DROPOUT, NEGATIVE, PRECISION)
    pid = tl.program_id(0)
    head = pid if WHOLE else pid // num_m
    # The longest rows of the causal form first: they are what the last programs would wait for.
    pid_m = num_m - 1 - pid % num_m if CAUSAL else pid % num_m
    batch, h = head // nheads, head % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    batch64, h64, start64 = batch.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    at = (w_ptr + batch64 * stride_wb + h64 * stride_wh + start64 * stride_ws, stride_ws, stride_wd)
    out_at = (out_ptr + batch64 * stride_ob + h64 * stride_oh + start64 * stride_os, stride_os, stride_od)
    lse_ptr += batch64 * stride_lb + h64 * stride_lh + start64
    if PADDED:
        mask_ptr += batch64 * seqlen
    seed = tl.load(seed_ptr) if DROPOUT else 0
    call = (mask_ptr, length, head, seed, qk_scale, drop_last, threshold)
    before = 0.0
    if WHOLE:
        tl.static_assert(not PACKED and not (CAUSAL and SOFTMAX == "bounded"))
        if SOFTMAX == "bounded":
            top = tl.zeros((BLOCK_M,), tl.float32)
            for start_m in range(0, length, BLOCK_M):
                rows = start_m + tl.arange(0, BLOCK_M)
                top = tl.maximum(top, norms(tile.load(at, rows, rows < length, DIMS), qk_scale))
            before = tl.max(top, 0)
        tail = (num_m - 1) * BLOCK_M if TAIL_M < BLOCK_M else num_m * BLOCK_M
        for start_m in range(0, tail, BLOCK_M):
            attend_rows(
                at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS
            )
        if TAIL_M < BLOCK_M:
            attend_rows(at, out_at, lse_ptr, call, tail, before, factor, SOFTMAX, TAIL_M, BLOCK_N, TAIL_N, FORM, DIMS)
    else:
        start_m = pid_m * BLOCK_M
        if SOFTMAX == "bounded":
            before = _largest(top_ptr + head.to(tl.int64) * num_m, pid_m if CAUSAL else num_m)
        if TAIL_M < BLOCK_M:
            if pid_m == num_m - 1:
                attend_rows(
                    at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, TAIL_M, BLOCK_N, TAIL_N, FORM, DIMS
                )
            else:
                attend_rows(
                    at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS
                )
        elif start_m < length:
            attend_rows(
                at, out_at, lse_ptr, call, start_m, before, factor, SOFTMAX, BLOCK_M, BLOCK_N, TAIL_N, FORM, DIMS
            )
        if PACKED:
            sequences = tl.num_programs(0) // (nheads * num_m)
            first, stop = jit.uncovered(cu_seqlens_ptr, batch, sequences, seqlen, total)
            tile.zero_rows((out_ptr + h64 * stride_oh, stride_os, stride_od), first, stop, pid_m, num_m, BLOCK_M, DIMS)
            tile.zero_numbers(lse_ptr - start64, first, stop, pid_m, num_m, BLOCK_M)
