"""What the kernels of both forms of token statistics do with a tile (BLOCK_N tokens, BLOCK_H heads, BLOCK_D channels).

A tile has every head of a token, for the softmax over heads; heads and channels are padded to powers of two.
Padding is loaded as zero. What lies outside a tensor costs lanes, never bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FULL_FLOOR = tl.constexpr(1e-24)
CAUSAL_FLOOR = tl.constexpr(1e-12)
MASS_FLOOR = tl.constexpr(1e-8)
_COLUMNS = 128


@triton.jit
def floored(x, FLOOR: tl.constexpr):
    """Return max(x, FLOOR) that lets NaN through, which ``tl.maximum`` would not."""
    return tl.where(x < FLOOR, FLOOR, x)


@triton.jit
def token_places(
    rows, heads, channels, end, stride_s, stride_h, stride_d, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Return the offsets of a tile's elements and which of them exist, (BLOCK_N, BLOCK_H, BLOCK_D)."""
    inside = (rows < end)[:, None, None] & (heads < NHEADS)[None, :, None] & (channels < HEAD_DIM)[None, None, :]
    places = rows.to(tl.int64)[:, None, None] * stride_s + channels.to(tl.int64)[None, None, :] * stride_d
    return places + heads.to(tl.int64)[None, :, None] * stride_h, inside


@triton.jit
def load_tokens(
    ptr, rows, heads, channels, end, stride_s, stride_h, stride_d, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Load a tile of tokens in fp32."""
    places, inside = token_places(rows, heads, channels, end, stride_s, stride_h, stride_d, NHEADS, HEAD_DIM)
    return tl.load(ptr + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(
    ptr, value, rows, heads, channels, end, stride_s, stride_h, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Round a tile once and store it; channels are contiguous in whatever is written."""
    places, inside = token_places(rows, heads, channels, end, stride_s, stride_h, 1, NHEADS, HEAD_DIM)
    tl.store(ptr + places, value, mask=inside)


@triton.jit
def row_places(rows, heads, end, stride_h, NHEADS: tl.constexpr):
    """Return the offsets of a tile's scalars by token and head, and which of them exist, (BLOCK_N, BLOCK_H)."""
    inside = (rows < end)[:, None] & (heads < NHEADS)[None, :]
    return rows.to(tl.int64)[:, None] + heads.to(tl.int64)[None, :] * stride_h, inside


@triton.jit
def load_rows(ptr, rows, heads, end, stride_h, NHEADS: tl.constexpr):
    """Load what a tile has by token and head, as its membership."""
    places, inside = row_places(rows, heads, end, stride_h, NHEADS)
    return tl.load(ptr + places, mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, value, rows, heads, end, stride_h, NHEADS: tl.constexpr):
    """Store what a tile has by token and head."""
    places, inside = row_places(rows, heads, end, stride_h, NHEADS)
    tl.store(ptr + places, value, mask=inside)


@triton.jit
def kept(mask_ptr, rows, end, stride_ms):
    """Return the 0/1 factor of each token in the sums over tokens, (BLOCK_N,)."""
    inside = rows < end
    if mask_ptr is None:
        return inside.to(tl.float32)
    else:
        return tl.load(mask_ptr + rows.to(tl.int64) * stride_ms, mask=inside, other=0).to(tl.float32)


@triton.jit
def channel_places(heads, channels, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the offsets in a contiguous (NHEADS, HEAD_DIM) and which of them exist, (BLOCK_H, BLOCK_D)."""
    inside = (heads < NHEADS)[:, None] & (channels < HEAD_DIM)[None, :]
    return heads[:, None] * HEAD_DIM + channels[None, :], inside


@triton.jit
def load_sums(ptr, heads, channels, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load sums over tokens: one a channel, (BLOCK_H, BLOCK_D), and behind all of them one a head, (BLOCK_H,)."""
    places, inside = channel_places(heads, channels, NHEADS, HEAD_DIM)
    by_channel = tl.load(ptr + places, mask=inside, other=0.0)
    return by_channel, tl.load(ptr + NHEADS * HEAD_DIM + heads, mask=heads < NHEADS, other=0.0)


@triton.jit
def store_sums(ptr, by_channel, by_head, heads, channels, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store what ``load_sums`` loads."""
    places, inside = channel_places(heads, channels, NHEADS, HEAD_DIM)
    tl.store(ptr + places, by_channel, mask=inside)
    tl.store(ptr + NHEADS * HEAD_DIM + heads, by_head, mask=heads < NHEADS)


@triton.jit
def before_chunk(sums_ptr, pid, chunk, heads, channels, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the sums over the chunks before ``chunk``, of which ``sums_ptr`` has those up to each one."""
    row = (pid.to(tl.int64) - (chunk > 0)) * (NHEADS * (HEAD_DIM + 1))
    by_channel, by_head = load_sums(sums_ptr + row, heads, channels, NHEADS, HEAD_DIM)
    return tl.where(chunk > 0, by_channel, 0.0), tl.where(chunk > 0, by_head, 0.0)


@triton.jit
def after_chunk(sums_ptr, pid, chunk, nchunks, heads, channels, NHEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the sums over the chunks after ``chunk``, of which ``sums_ptr`` has those from each one on."""
    there = chunk + 1 < nchunks
    row = (pid.to(tl.int64) + there) * (NHEADS * (HEAD_DIM + 1))
    by_channel, by_head = load_sums(sums_ptr + row, heads, channels, NHEADS, HEAD_DIM)
    return tl.where(there, by_channel, 0.0), tl.where(there, by_head, 0.0)


@triton.jit
def _join_blocks(sums, totals, SIZE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join blocks of SIZE tokens in pairs: the first of each adds the total of the second to its sums."""
    half = tl.arange(0, 2)[None, :, None, None]
    totals = tl.reshape(totals, (PAIRS, 2, BLOCK_H, BLOCK_D))
    later = tl.sum(tl.where(half == 1, totals, 0.0), 1)
    sums = tl.reshape(sums, (PAIRS, 2, SIZE, BLOCK_H, BLOCK_D))
    sums += tl.where(half == 0, later[:, None, :, :], 0.0)[:, :, None, :, :]
    return sums, tl.sum(totals, 1)


@triton.jit
def suffix_sums(x, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the sums over tokens from each one on, by doubling blocks of tokens.

    ``tl.cumsum(reverse=True)`` turns a tile around and back by ten warp shuffles an element, whatever its layout.
    Where a thread has all tokens of its channels, this takes none.
    """
    sums, totals = x, x
    for level in tl.static_range(10):
        if (1 << level) < BLOCK_N:
            sums, totals = _join_blocks(sums, totals, 1 << level, BLOCK_N >> (level + 1), BLOCK_H, BLOCK_D)
    return tl.reshape(sums, (BLOCK_N, BLOCK_H, BLOCK_D))


@triton.jit
def softmax_over_heads(logits, heads, NHEADS: tl.constexpr):
    """Return the membership of each token, (BLOCK_N, BLOCK_H)."""
    logits = tl.where((heads < NHEADS)[None, :], logits, -float("inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def softmax_backward(members, dmembers):
    """Return the gradient of the logits, (BLOCK_N, BLOCK_H)."""
    return members * (dmembers - tl.sum(members * dmembers, 1)[:, None])


@triton.jit
def clear_uncovered(
    out_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    index,
    nsequences,
    start,
    count,
    total,
    stride_s,
    stride_h,
    stride_rows,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Zero the packed rows between what sequence ``index`` covers and the next one, and before the first.

    ``rows_ptr`` is a second tensor to clear, with a value a token and head, or None.
    """
    heads, channels = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    next_start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + index + 1), 0), total)
    end = tl.where(index == nsequences - 1, total, next_start)
    # Mostly from where the sequence ends to where the next one begins: no row at all.
    before = (index == 0) & (start > 0)
    for first in tl.range(tl.where(before, 0, start + count), end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        # Rows of the sequence itself are left to whoever computes them.
        places, inside = token_places(rows, heads, channels, end, stride_s, stride_h, 1, NHEADS, HEAD_DIM)
        outside = (rows < start) | (rows >= start + count)
        tl.store(
            out_ptr + places, tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32), mask=inside & outside[:, None, None]
        )
        if rows_ptr is not None:
            places, inside = row_places(rows, heads, end, stride_rows, NHEADS)
            tl.store(rows_ptr + places, tl.zeros((BLOCK_N, BLOCK_H), tl.float32), mask=inside & outside[:, None])


@triton.jit(do_not_specialize=("nchunks", "size"))
def _scan_chunks_kernel(sums_ptr, nchunks, size, REVERSE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr):
    """Add up (nchunks, size) sums over the chunks up to each one, or from each one on, in place."""
    nblocks = tl.cdiv(size, BLOCK_X)
    pid = tl.program_id(0)
    columns = (pid % nblocks) * BLOCK_X + tl.arange(0, BLOCK_X)
    sums_ptr += (pid // nblocks).to(tl.int64) * nchunks * size
    carried = tl.zeros((BLOCK_X,), tl.float32)
    for c in tl.range(0, nchunks, BLOCK_C):
        chunks = c + tl.arange(0, BLOCK_C)
        inside = (chunks < nchunks)[:, None] & (columns < size)[None, :]
        if REVERSE:
            chunks = nchunks - 1 - chunks
        places = chunks.to(tl.int64)[:, None] * size + columns[None, :]
        values = tl.load(sums_ptr + places, mask=inside, other=0.0)
        tl.store(sums_ptr + places, carried[None, :] + tl.cumsum(values, 0), mask=inside)
        carried += tl.sum(values, 0)


def scan_chunks(sums: Tensor, reverse: bool = False) -> None:
    """Add up (..., nchunks, size) in place over the chunks up to each one, or from each one on."""
    nchunks, size = sums.shape[-2:]
    if nchunks == 1:
        return
    rows = sums.numel() // (nchunks * size) if sums.numel() else 0
    _scan_chunks_kernel[(rows * triton.cdiv(size, _COLUMNS),)](
        sums, nchunks, size, REVERSE=reverse, BLOCK_C=16, BLOCK_X=_COLUMNS, num_warps=4
    )
