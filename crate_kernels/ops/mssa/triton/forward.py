"""The forward of subspace attention in Triton: a tile of w, once on chip, is both key and value.

The symbols of docs/mssa.md, ``s_ij = scale * w_i . w_j``. A program owns BLOCK_M rows i and walks over tiles of
BLOCK_N keys j: two products per tile, 4 seqlen^2 head_dim FLOP per head (half of it when causal). Memory gives w once,
and once more to ``_mssa_norms_kernel`` where the softmax is bounded; it takes out and lse once. rows.py has the
walk and the two forms of the softmax, pairs.py the form for short sequences that finds each score once.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import jit, launch
from crate_kernels.ops.mssa.call import Call, empty_lse
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.head import Form, find_head, offset_of, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.launch import Launch, strides
from crate_kernels.ops.mssa.triton.pairs import MOST_TILES, forward_pairs
from crate_kernels.ops.mssa.triton.rows import attend_rows, norms


@triton.jit
def _largest(top_ptr, count):
    """Return the largest of ``count`` numbers, none of which is negative."""
    top = tl.zeros((64,), tl.float32)
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        top = tl.maximum(top, tl.load(top_ptr + offs, mask=offs < count, other=0.0))
    return tl.max(top, 0)


# Sizes vary per call: do not specialise on them.
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
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the largest n of every block of BLOCK_M rows to top (heads, num_m); w is read once."""
    DIMS: tl.constexpr = tile.split_dims(HEAD_DIM)
    pid = tl.program_id(0)
    head = find_head(pid // num_m, nheads, seqlen, total, cu_seqlens_ptr, PACKED)
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tokens_of(head, w_ptr, stride_wb, stride_wh, stride_ws, stride_wd)
    w_m = tile.load(w, offs_m, offs_m < head.length, DIMS)  # (BLOCK_M, HEAD_DIM)
    tl.store(top_ptr + pid, tl.max(norms(w_m, qk_scale), 0))


# Sizes vary per call: do not specialise on them.
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
    keep_factor,
    threshold,
    HEAD_DIM: tl.constexpr,
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
    FORM: tl.constexpr = Form(
        tile.split_dims(HEAD_DIM), PRECISION, BLOCK_N, TAIL_N, SOFTMAX, CAUSAL, PADDED, DROPOUT, NEGATIVE
    )
    pid = tl.program_id(0)
    number = pid if WHOLE else pid // num_m
    # Causal: begin with the longest rows, which else would run last and alone.
    pid_m = num_m - 1 - pid % num_m if CAUSAL else pid % num_m
    head = find_head(number, nheads, seqlen, total, cu_seqlens_ptr, PACKED)
    w = tokens_of(head, w_ptr, stride_wb, stride_wh, stride_ws, stride_wd)
    out = tokens_of(head, out_ptr, stride_ob, stride_oh, stride_os, stride_od)
    lse_ptr += offset_of(head, stride_lb, stride_lh)
    scores = scores_of(head, seqlen, qk_scale, mask_ptr, seed_ptr, drop_last, keep_factor, FORM, threshold=threshold)
    before = 0.0
    if WHOLE:
        tl.static_assert(not PACKED and not (CAUSAL and SOFTMAX == "bounded"))
        if SOFTMAX == "bounded":
            top = tl.zeros((BLOCK_M,), tl.float32)
            for start_m in range(0, head.length, BLOCK_M):
                rows = start_m + tl.arange(0, BLOCK_M)
                top = tl.maximum(top, norms(tile.load(w, rows, rows < head.length, FORM.DIMS), qk_scale))
            before = tl.max(top, 0)
        tail = (num_m - 1) * BLOCK_M if TAIL_M < BLOCK_M else num_m * BLOCK_M
        for start_m in range(0, tail, BLOCK_M):
            attend_rows(w, out, lse_ptr, scores, start_m, before, BLOCK_M, FORM)
        if TAIL_M < BLOCK_M:
            attend_rows(w, out, lse_ptr, scores, tail, before, TAIL_M, FORM)
    else:
        start_m = pid_m * BLOCK_M
        if SOFTMAX == "bounded":
            before = _largest(top_ptr + head.number.to(tl.int64) * num_m, pid_m if CAUSAL else num_m)
        if TAIL_M < BLOCK_M:
            if pid_m == num_m - 1:
                attend_rows(w, out, lse_ptr, scores, start_m, before, TAIL_M, FORM)
            else:
                attend_rows(w, out, lse_ptr, scores, start_m, before, BLOCK_M, FORM)
        elif start_m < head.length:
            attend_rows(w, out, lse_ptr, scores, start_m, before, BLOCK_M, FORM)
        if PACKED:
            sequences = tl.num_programs(0) // (nheads * num_m)
            first, stop = jit.uncovered(cu_seqlens_ptr, head.batch, sequences, seqlen, total)
            every = tile.Tokens(out_ptr + head.h.to(tl.int64) * stride_oh, stride_os, stride_od)
            tile.zero_rows(every, first, stop, pid_m, num_m, BLOCK_M, FORM.DIMS)
            tile.zero_numbers(lse_ptr - head.start.to(tl.int64), first, stop, pid_m, num_m, BLOCK_M)


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    out, lse = operator.empty_out(w), empty_lse(w)
    if out.numel() == 0:
        return out, lse
    sizes = Launch(w, call)
    config = dict(tables.FORWARD.config(w.device, sizes.head_dim, sizes.seqlen, call.causal, w.dtype))
    bounded, whole, pairs = (bool(config.pop(name)) for name in ("BOUNDED", "WHOLE", "PAIRS"))
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    num_m = sizes.blocks(block_m)
    many = sizes.heads >= 2 * launch.multiprocessors(w.device)
    softmax = call.threshold is None and call.scale > 0
    # fp16 holds weights down to 2^-24 only: all of a row may be smaller in the bounded form, never in the online one.
    # A padded query is not among its own keys: its sum has no lower bound.
    bounded = bounded and softmax and w.dtype != torch.float16 and not call.padded
    plain = softmax and not (call.causal or call.packed or call.padded or call.dropout_p)
    if pairs and plain and many and num_m <= MOST_TILES:
        forward_pairs(w, out, lse, sizes, block_m, config["num_warps"])
        return out, lse
    whole = whole and many and not call.packed and not (call.causal and bounded)
    shared = {"num_m": num_m, **sizes.sizes(), **strides("w", w)}
    top = w.new_empty(sizes.heads, num_m, dtype=torch.float32) if bounded and not whole else None
    with launch.guard(w.device):
        if top is not None:
            _mssa_norms_kernel[(sizes.heads * num_m,)](w_ptr=w, top_ptr=top, BLOCK_M=block_m, **shared)
        _mssa_fwd_kernel[(sizes.heads * (1 if whole else num_m),)](
            w_ptr=w,
            out_ptr=out,
            lse_ptr=lse,
            top_ptr=top,
            **shared,
            **strides("o", out),
            **sizes.row_strides(),
            **sizes.form(),
            threshold=call.threshold or 0.0,
            TAIL_M=sizes.tail(block_m),
            TAIL_N=block_n if call.causal else sizes.tail(block_n),
            SOFTMAX="bounded" if bounded else "online" if call.threshold is None else "threshold",
            WHOLE=whole,
            **config,
        )
    return out, lse
