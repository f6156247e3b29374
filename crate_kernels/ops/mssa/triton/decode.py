"""Decoding with a SubspaceCache in Triton: each cached token is read once, and is key and value.

A program attends with BLOCK_M new tokens over one of ``splits`` stretches of the cached sequence; that of the last
stretch also attends over the new tokens, and appends its own to the cache. ``_mssa_combine_kernel`` then weighs the
stretches by their lse, and advances the lengths, which nothing reads any more by then. Bytes of a step: batch * nheads
* cached * head_dim * itemsize, once. Lengths are read on the device, sequence by sequence: a captured graph stays
right as they grow.

Positions beyond the capacity are dropped: never written, and seen by no token.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import DecodeCall, empty_decoded
from crate_kernels.ops.mssa.splits import cdiv, choose_splits
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.head import Form, Scores, find_head, tokens_of
from crate_kernels.ops.mssa.triton.launch import strides
from crate_kernels.ops.mssa.triton.rows import attend_tiles, empty_state


@triton.jit
def _space(lengths_ptr, mask_ptr, batch, new, capacity, PADDED: tl.constexpr):
    """Return how many tokens a sequence has cached, and how many of its new ones are appended: kept, and with room.

    The mask is right-padded, so that its kept tokens are the first.
    """
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)
    kept = new
    if PADDED:
        kept = 0
        for start in range(0, new, 128):
            offs = start + tl.arange(0, 128)
            keep = tl.load(mask_ptr + batch.to(tl.int64) * new + offs, mask=offs < new, other=0) != 0
            kept += tl.sum(keep.to(tl.int32), 0)
    return length, tl.minimum(kept, capacity - length)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "new", "capacity", "num_m", "splits"])
def _mssa_decode_kernel(
    w_ptr,
    data_ptr,
    lengths_ptr,
    mask_ptr,
    part_ptr,
    part_lse_ptr,
    stride_wb,
    stride_wh,
    stride_ws,
    stride_wd,
    stride_cb,
    stride_ch,
    stride_cs,
    stride_cd,
    nheads,
    new,
    capacity,
    num_m,
    splits,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write out and lse of some new tokens over one stretch: part (heads, splits, new, HEAD_DIM)."""
    CACHED: tl.constexpr = Form(tile.split_dims(HEAD_DIM), PRECISION, BLOCK_N, BLOCK_N, NEGATIVE=NEGATIVE)
    CAUSAL: tl.constexpr = Form(tile.split_dims(HEAD_DIM), PRECISION, BLOCK_N, BLOCK_N, CAUSAL=True, NEGATIVE=NEGATIVE)
    pid = tl.program_id(0)
    split = pid % splits
    pid_m = pid // splits % num_m
    head = find_head(pid // splits // num_m, nheads, new, 0, None, False)
    length, appended = _space(lengths_ptr, mask_ptr, head.batch, new, capacity, PADDED)
    w = tokens_of(head, w_ptr, stride_wb, stride_wh, stride_ws, stride_wd)
    cached = tokens_of(head, data_ptr, stride_cb, stride_ch, stride_cs, stride_cd)
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    w_m = tile.load(w, offs_m, offs_m < new, CACHED.DIMS)  # (BLOCK_M, HEAD_DIM)
    state = empty_state(BLOCK_M, CACHED)

    stretch = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    first = tl.minimum(split * stretch, length)
    stop = tl.minimum(first + stretch, length)
    whole = first + (stop - first) // BLOCK_N * BLOCK_N
    scores = Scores(length=stop, qk_scale=qk_scale)
    state = attend_tiles(state, w_m, cached, scores, offs_m, first, whole, "online", False, CACHED)
    state = attend_tiles(state, w_m, cached, scores, offs_m, whole, stop, "online", True, CACHED)
    if split == splits - 1:
        scores = Scores(length=appended, qk_scale=qk_scale)
        whole = tl.minimum(start_m + 1, appended) // BLOCK_N * BLOCK_N
        stop = tl.minimum(start_m + BLOCK_M, appended)
        state = attend_tiles(state, w_m, w, scores, offs_m, 0, whole, "online", False, CAUSAL)
        state = attend_tiles(state, w_m, w, scores, offs_m, whole, stop, "online", True, CAUSAL)
        end = tile.Tokens(cached.ptr + length.to(tl.int64) * stride_cs, stride_cs, stride_cd)
        tile.store(end, w_m, offs_m, offs_m < appended, CACHED.DIMS)

    acc, m_i, l_i = state
    empty = l_i == 0.0
    part = (head.number.to(tl.int64) * splits + split) * new
    out = tile.Tokens(part_ptr + part * HEAD_DIM, HEAD_DIM, 1)
    tile.store(out, tile.scale(acc, 1.0 / tl.where(empty, 1.0, l_i)), offs_m, offs_m < new, CACHED.DIMS)
    lse = tl.where(empty, -float("inf"), m_i + tl.log(tl.where(empty, 1.0, l_i)))
    tl.store(part_lse_ptr + part + offs_m, lse, mask=offs_m < new)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "new", "capacity", "num_m", "splits"])
def _mssa_combine_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    lengths_ptr,
    mask_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_od,
    nheads,
    new,
    capacity,
    num_m,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write out and lse of BLOCK_M new tokens from those of the stretches; a sequence's first program advances it."""
    DIMS: tl.constexpr = tile.split_dims(HEAD_DIM)
    pid = tl.program_id(0)
    pid_m = pid % num_m
    head = find_head(pid // num_m, nheads, new, 0, None, False)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < new
    number = head.number.to(tl.int64)
    first = number * splits * new
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(part_lse_ptr + first + split * new + offs_m, mask=mask_m, other=-float("inf")))
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tile.zeros(BLOCK_M, DIMS)  # (BLOCK_M, HEAD_DIM)
    for split in range(splits):
        part = first + split * new
        share = tl.exp(tl.load(part_lse_ptr + part + offs_m, mask=mask_m, other=-float("inf")) - base)
        stretch = tile.Tokens(part_ptr + part * HEAD_DIM, HEAD_DIM, 1)
        acc = tile.add(acc, tile.scale(tile.load(stretch, offs_m, mask_m, DIMS), share))
        total += share
    empty = total == 0.0
    out = tokens_of(head, out_ptr, stride_ob, stride_oh, stride_os, stride_od)
    tile.store(out, tile.scale(acc, 1.0 / tl.where(empty, 1.0, total)), offs_m, mask_m, DIMS)
    if HAS_LSE:
        lse = tl.where(empty, -float("inf"), base + tl.log(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + number * new + offs_m, lse, mask=mask_m)
    if head.h + pid_m == 0:
        length, appended = _space(lengths_ptr, mask_ptr, head.batch, new, capacity, PADDED)
        tl.store(lengths_ptr + head.batch, length + appended)


_COMBINED_ROWS = 16  # new tokens per program of the second kernel


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``call.bound`` serves only to choose the number of stretches."""
    batch, nheads, new, head_dim = w.shape
    out, lse = empty_decoded(w, call)
    if out.numel() == 0:
        return out, lse
    config = dict(tables.DECODE.config(w.device, head_dim, new, True, w.dtype))
    heads, num_m = batch * nheads, cdiv(new, config["BLOCK_M"])
    processors = config.pop("RESIDENT") * launch.multiprocessors(w.device)
    splits = choose_splits(heads * num_m, processors, cdiv(call.bound, config["BLOCK_N"]))
    shared = {
        "part_ptr": w.new_empty(heads, splits, new, head_dim, dtype=torch.float32),
        "part_lse_ptr": w.new_empty(heads, splits, new, dtype=torch.float32),
        "lengths_ptr": lengths,
        "mask_ptr": call.key_padding_mask,
        "nheads": nheads,
        "new": new,
        "capacity": data.shape[2],
        "splits": splits,
        "HEAD_DIM": head_dim,
        "PADDED": call.key_padding_mask is not None,
    }
    with launch.guard(w.device):
        _mssa_decode_kernel[(heads * num_m * splits,)](
            w_ptr=w,
            data_ptr=data,
            **shared,
            **strides("w", w),
            **strides("c", data),
            num_m=num_m,
            qk_scale=abs(call.scale),
            NEGATIVE=call.scale < 0,
            PRECISION=launch.dot_precision(w.dtype),
            **config,
        )
        num_m = cdiv(new, _COMBINED_ROWS)
        _mssa_combine_kernel[(heads * num_m,)](
            out_ptr=out,
            lse_ptr=lse,
            **shared,
            **strides("o", out),
            num_m=num_m,
            BLOCK_M=_COMBINED_ROWS,
            HAS_LSE=call.need_lse,
        )
    return out, lse
