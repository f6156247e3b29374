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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import DecodeCall, empty_decoded
from crate_kernels.ops.mssa.splits import cdiv, choose_splits
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.head import Scores, find_head, form_of, key_range, tokens_of
from crate_kernels.ops.mssa.triton.launch import magnitude, strided
from crate_kernels.ops.mssa.triton.rows import LOG2_E, attend_tiles, empty_state, finish


class DecodeStep(NamedTuple):
    """The options of a step, and the results of stretches: part (heads, splits, new, HEAD_DIM) and its lse."""

    part_ptr: Any
    part_lse_ptr: Any
    lengths_ptr: Any
    mask_ptr: Any
    qk_scale: Any


@triton.jit
def _space(step, batch, new, capacity):
    """Return how many tokens a sequence has cached, and how many of its new ones are kept and fit the capacity.

    The mask is right-padded, so that its kept tokens are the first.
    """
    length = tl.minimum(tl.maximum(tl.load(step.lengths_ptr + batch), 0), capacity)
    kept = new
    if step.mask_ptr is not None:
        kept = 0
        for start in range(0, new, 128):
            offs = start + tl.arange(0, 128)
            keep = tl.load(step.mask_ptr + batch.to(tl.int64) * new + offs, mask=offs < new, other=0) != 0
            kept += tl.sum(keep.to(tl.int32), 0)
    return length, tl.minimum(kept, capacity - length)


@triton.jit
def _stretch(step, head, split, splits, new, HEAD_DIM: tl.constexpr):
    """Return the result of a head over a stretch: its tokens, and the pointer to its lse."""
    first = (head.number.to(tl.int64) * splits + split) * new
    return tile.TokenRows(step.part_ptr + first * HEAD_DIM, HEAD_DIM, 1), step.part_lse_ptr + first


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "new", "capacity", "num_m", "splits"])
def _mssa_decode_kernel(
    w, data, step, nheads, new, capacity, num_m, splits, BLOCK_M: tl.constexpr, CACHED: tl.constexpr, NEW: tl.constexpr
):
    """Write out and lse of some new tokens over one stretch."""
    BLOCK_N: tl.constexpr = CACHED.BLOCK
    pid = tl.program_id(0)
    split = pid % splits
    pid_m = pid // splits % num_m
    head = find_head(pid // splits // num_m, nheads, new)
    length, appended = _space(step, head.batch, new, capacity)
    w, cached = tokens_of(head, w), tokens_of(head, data)
    start_m = pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    w_m = tile.load(w, offs_m, offs_m < new, CACHED)  # (BLOCK_M, HEAD_DIM)
    state = empty_state(BLOCK_M, CACHED)

    stretch = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    first = tl.minimum(split * stretch, length)
    stop = tl.minimum(first + stretch, length)
    whole = first + (stop - first) // BLOCK_N * BLOCK_N
    scores = Scores(stop, step)
    state = attend_tiles(state, w_m, cached, scores, offs_m, first, whole, "online", False, CACHED)
    state = attend_tiles(state, w_m, cached, scores, offs_m, whole, stop, "online", True, CACHED)
    if split == splits - 1:
        scores = Scores(appended, step)
        whole, stop = key_range(scores, start_m, BLOCK_M, NEW)
        state = attend_tiles(state, w_m, w, scores, offs_m, 0, whole, "online", False, NEW)
        state = attend_tiles(state, w_m, w, scores, offs_m, whole, stop, "online", True, NEW)
        end = tile.TokenRows(cached.ptr + length.to(tl.int64) * cached.stride_s, cached.stride_s, cached.stride_d)
        tile.store(end, w_m, offs_m, offs_m < appended, CACHED)

    part, part_lse_ptr = _stretch(step, head, split, splits, new, CACHED.HEAD_DIM)
    finish(state, step.qk_scale, part, part_lse_ptr, offs_m, offs_m < new, 1.0, CACHED)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "new", "capacity", "num_m", "splits"])
def _mssa_combine_kernel(
    out, lse_ptr, step, nheads, new, capacity, num_m, splits,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Write out and lse of BLOCK_M new tokens from those of the stretches; a sequence's first program advances it.

    BLOCK_S stretches are loaded at a time: with many of them, what a program waits for is its loads.
    """
    pid = tl.program_id(0)
    pid_m = pid % num_m
    head = find_head(pid // num_m, nheads, new)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    part, part_lse_ptr = _stretch(step, head, 0, splits, new, DIMS.HEAD_DIM)
    # Row k of a tile is token k % BLOCK_M of stretch k // BLOCK_M.
    numbers = tl.arange(0, BLOCK_S * BLOCK_M)
    token = pid_m * BLOCK_M + numbers % BLOCK_M
    row_sum = tl.zeros((BLOCK_M,), tl.float32)  # (BLOCK_M,)
    row_max = row_sum - float("inf")  # (BLOCK_M,)
    acc = tile.zeros(BLOCK_M, DIMS)  # (BLOCK_M, HEAD_DIM)
    for first in range(0, splits, BLOCK_S):
        split = first + numbers // BLOCK_M
        rows, mask = split * new + token, (split < splits) & (token < new)
        results = tile.load(part, rows, mask, DIMS)  # (BLOCK_S * BLOCK_M, HEAD_DIM)
        lse = tl.load(part_lse_ptr + rows, mask=mask, other=-float("inf")).reshape(BLOCK_S, BLOCK_M)
        old_max = row_max
        row_max = tl.maximum(row_max, tl.max(lse, 0))
        base = tl.where(row_max == -float("inf"), 0.0, row_max)
        shrink = tl.exp2((old_max - base) * LOG2_E)  # (BLOCK_M,)
        weights = tl.exp2((lse - base[None, :]) * LOG2_E)  # (BLOCK_S, BLOCK_M)
        results = tile.scale(results, weights.reshape(BLOCK_S * BLOCK_M))
        acc = tile.add(tile.scale(acc, shrink), tile.sum_groups(results, BLOCK_S))
        row_sum = row_sum * shrink + tl.sum(weights, 0)
    if lse_ptr is not None:
        lse_ptr += head.row
    finish((acc, row_max, row_sum), 1.0, tokens_of(head, out), lse_ptr, offs_m, offs_m < new, 1.0, DIMS)
    if head.h + pid_m == 0:
        length, appended = _space(step, head.batch, new, capacity)
        tl.store(step.lengths_ptr + head.batch, length + appended)


_COMBINED = 32  # rows of stretches that a program of the second kernel loads at a time, of at most 16 new tokens


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; ``call.bound`` serves only to choose the number of stretches."""
    op_checks.decode(w, data, lengths, call)
    batch, nheads, new, head_dim = w.shape
    out, lse = empty_decoded(w, call)
    if out.numel() == 0:
        return out, lse
    config = dict(tables.DECODE.config(w.device, head_dim, new, True, w.dtype))
    block_m, block_n = config.pop("BLOCK_M"), config.pop("BLOCK_N")
    heads, num_m = batch * nheads, cdiv(new, block_m)
    processors = config.pop("RESIDENT") * launch.multiprocessors(w.device)
    splits = choose_splits(heads * num_m, processors, cdiv(call.bound, block_n))
    step = DecodeStep(
        part_ptr=w.new_empty(heads, splits, new, head_dim, dtype=torch.float32),
        part_lse_ptr=w.new_empty(heads, splits, new, dtype=torch.float32),
        lengths_ptr=lengths,
        mask_ptr=call.key_padding_mask,
        qk_scale=magnitude(call.scale),
    )
    shared = {"step": step, "nheads": nheads, "new": new, "capacity": data.shape[2], "splits": splits}
    dims, precision = tile.split_dims(head_dim), launch.dot_precision(w.dtype)
    cached = form_of(*dims, PRECISION=precision, BLOCK=block_n, TAIL=block_n, NEGATIVE=call.scale < 0)
    with launch.guard(w.device):
        launch.run(
            _mssa_decode_kernel,
            heads * num_m * splits,
            **shared,
            w=strided(w),
            data=strided(data),
            num_m=num_m,
            BLOCK_M=block_m,
            CACHED=cached,
            NEW=cached._replace(CAUSAL=True),
            **config,
        )
        block_m = min(1 << (new - 1).bit_length(), 16)
        num_m = cdiv(new, block_m)
        launch.run(
            _mssa_combine_kernel,
            heads * num_m,
            **shared,
            out=strided(out),
            lse_ptr=lse if call.need_lse else None,
            num_m=num_m,
            BLOCK_M=block_m,
            BLOCK_S=_COMBINED // block_m,
            DIMS=dims,
        )
    return out, lse
