"""Decoding with a SubspaceCache in Triton: each cached token is read once, and is key and value.

A program attends with BLOCK_M new tokens over one of ``splits`` stretches of the cached sequence; that of the last
stretch also attends over the new tokens, and appends its own to the cache. ``_mssa_combine_kernel`` then weighs the
stretches by their lse, and advances the lengths, which nothing reads any more by then. Bytes of a step: batch * nheads
* cached * head_dim * itemsize, once. Lengths are read on the device, sequence by sequence: a captured graph goes on
being right as they grow.

Positions beyond the capacity are dropped: never written, and seen by no token.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import DecodeCall
from crate_kernels.ops.mssa.splits import cdiv, choose_splits
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.rows import attend_tiles
from crate_kernels.ops.mssa.triton.shape import strides


@triton.jit
def _room(lengths_ptr, mask_ptr, batch, new, capacity, PADDED: tl.constexpr):
    """Return how many tokens a sequence holds, and how many of its new ones it will: kept, and within capacity.

    The mask is right-padded, so that its kept tokens are the first.
    """
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)
    kept = new + batch * 0
    if PADDED:
        kept = batch * 0
        for start in range(0, new, 128):
            offs = start + tl.arange(0, 128)
            keep = tl.load(mask_ptr + batch.to(tl.int64) * new + offs, mask=offs < new, other=0) != 0
            kept += tl.sum(keep.to(tl.int32), 0)
    return length, tl.minimum(kept, capacity - length)


# Lengths change from call to call: none of them may have kernels compiled of its own.
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
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write out and lse of some new tokens over one stretch: part (heads, splits, new, HEAD_DIM)."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    CACHED: tl.constexpr = (False, False, False, NEGATIVE, PRECISION)
    CAUSAL: tl.constexpr = (True, False, False, NEGATIVE, PRECISION)
    pid = tl.program_id(0)
    split = pid % splits
    pid_m = pid // splits % num_m
    head = pid // splits // num_m
    batch, h = head // nheads, head % nheads
    length, appended = _room(lengths_ptr, mask_ptr, batch, new, capacity, PADDED)
    batch64, h64, head64 = batch.to(tl.int64), h.to(tl.int64), head.to(tl.int64)
    at = (w_ptr + batch64 * stride_wb + h64 * stride_wh, stride_ws, stride_wd)
    cache_at = (data_ptr + batch64 * stride_cb + h64 * stride_ch, stride_cs, stride_cd)
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    w_m = tile.load(at, offs_m, offs_m < new, DIMS)  # (BLOCK_M, head_dim)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    state = (tile.zeros(BLOCK_M, DIMS), l_i - float("inf"), l_i)

    stretch = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    first = tl.minimum(split * stretch, length)
    stop = tl.minimum(first + stretch, length)
    whole = first + (stop - first) // BLOCK_N * BLOCK_N
    call = (mask_ptr, stop, head, 0, qk_scale, 0, 0.0)
    state = attend_tiles(state, w_m, cache_at, call, offs_m, first, whole, "online", False, BLOCK_N, CACHED, DIMS)
    state = attend_tiles(state, w_m, cache_at, call, offs_m, whole, stop, "online", True, BLOCK_N, CACHED, DIMS)
    if split == splits - 1:
        call = (mask_ptr, appended, head, 0, qk_scale, 0, 0.0)
        whole = tl.minimum(start_m + 1, appended) // BLOCK_N * BLOCK_N
        stop = tl.minimum(start_m + BLOCK_M, appended)
        state = attend_tiles(state, w_m, at, call, offs_m, 0, whole, "online", False, BLOCK_N, CAUSAL, DIMS)
        state = attend_tiles(state, w_m, at, call, offs_m, whole, stop, "online", True, BLOCK_N, CAUSAL, DIMS)
        end_at = (cache_at[0] + length.to(tl.int64) * stride_cs, stride_cs, stride_cd)
        tile.store(end_at, w_m, offs_m, offs_m < appended, DIMS)

    acc, m_i, l_i = state
    empty = l_i == 0.0
    part = (head64 * splits + split) * new
    part_at = (part_ptr + part * HEAD_DIM, HEAD_DIM, 1)
    tile.store(part_at, tile.scale(acc, 1.0 / tl.where(empty, 1.0, l_i)), offs_m, offs_m < new, DIMS)
    lse = tl.where(empty, -float("inf"), m_i + tl.log(tl.where(empty, 1.0, l_i)))
    tl.store(part_lse_ptr + part + offs_m, lse, mask=offs_m < new)


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
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write out and lse of BLOCK_M new tokens from those of the stretches; a sequence's first program advances it."""
    DIMS: tl.constexpr = (HEAD_DIM, D0, D1, D2)
    pid = tl.program_id(0)
    pid_m, head = pid % num_m, pid // num_m
    batch, h = head // nheads, head % nheads
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < new
    first = head.to(tl.int64) * splits * new
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(part_lse_ptr + first + split * new + offs_m, mask=mask_m, other=-float("inf")))
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tile.zeros(BLOCK_M, DIMS)
    for split in range(splits):
        part = first + split * new
        share = tl.exp(tl.load(part_lse_ptr + part + offs_m, mask=mask_m, other=-float("inf")) - base)
        part_at = (part_ptr + part * HEAD_DIM, HEAD_DIM, 1)
        acc = tile.add(acc, tile.scale(tile.load(part_at, offs_m, mask_m, DIMS), share))
        total += share
    empty = total == 0.0
    out_at = (out_ptr + batch.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh, stride_os, stride_od)
    tile.store(out_at, tile.scale(acc, 1.0 / tl.where(empty, 1.0, total)), offs_m, mask_m, DIMS)
    if HAS_LSE:
        lse = tl.where(empty, -float("inf"), base + tl.log(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + head.to(tl.int64) * new + offs_m, lse, mask=mask_m)
    if h + pid_m == 0:
        length, appended = _room(lengths_ptr, mask_ptr, batch, new, capacity, PADDED)
        tl.store(lengths_ptr + batch, length + appended)


_COMBINED_ROWS = 16


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``bound`` only says how long sequences can be, for splitting."""
    key_padding_mask, bound, _, scale, need_lse = call
    batch, nheads, new, head_dim = w.shape
    out = operator.empty_out(w)
    lse = w.new_empty((batch, nheads, new) if need_lse else (0,), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    config = dict(tables.DECODE.config(w.device, head_dim, new, True, w.dtype))
    num_m = cdiv(new, config["BLOCK_M"])
    processors = config.pop("RESIDENT") * launch.multiprocessors(w.device)
    splits = choose_splits(batch * nheads * num_m, processors, cdiv(bound, config["BLOCK_N"]))
    part = w.new_empty(batch * nheads, splits, new, head_dim, dtype=torch.float32)
    part_lse = w.new_empty(batch * nheads, splits, new, dtype=torch.float32)
    mask = None if key_padding_mask is None else key_padding_mask.contiguous()
    dims = (head_dim, *tile.parts(head_dim))
    capacity = data.shape[2]
    with launch.guard(w.device):
        _mssa_decode_kernel[(batch * nheads * num_m * splits,)](
            w,
            data,
            lengths,
            mask,
            part,
            part_lse,
            *strides(w),
            *strides(data),
            *(nheads, new, capacity, num_m, splits, abs(scale)),
            *dims,
            PADDED=mask is not None,
            NEGATIVE=scale < 0,
            PRECISION=launch.dot_precision(w.dtype),
            **config,
        )
        num_m = cdiv(new, _COMBINED_ROWS)
        _mssa_combine_kernel[(batch * nheads * num_m,)](
            part,
            part_lse,
            out,
            lse,
            lengths,
            mask,
            *strides(out),
            *(nheads, new, capacity, num_m, splits),
            *dims,
            BLOCK_M=_COMBINED_ROWS,
            PADDED=mask is not None,
            HAS_LSE=need_lse,
        )
    return out, lse
