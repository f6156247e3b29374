"""Places, loads and stores of a tile: (BLOCK_N tokens, BLOCK_H heads, BLOCK_D channels).

A tile has every head of a token, for the softmax over heads (members.py). Heads and channels are padded to powers of
two. Padding is loaded as zero: beyond a tensor there are lanes, never bytes.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from crate_kernels._triton.jit import keep_mask, sequence_bounds, uncovered

FULL_FLOOR = tl.constexpr(1e-24)
CAUSAL_FLOOR = tl.constexpr(1e-12)
MASS_FLOOR = tl.constexpr(1e-8)
# A power of two that keeps reciprocals of sums normal: sums from 1e-12 to 3e38 times it are in [2^-80, 2^88].
SHIFT = tl.constexpr(2.0**-40)
# Most tokens of a tile that a thread has all of. Only the interpreter has larger tiles in the causal form.
APART = tl.constexpr(8)


class TokenDims(NamedTuple):
    """Sizes of a token and of a tile, whether the code is PTX, and whether logits are float64: for float32 tokens."""

    NHEADS: int
    HEAD_DIM: int
    BLOCK_H: int
    BLOCK_D: int
    PTX: bool
    WIDE: bool = False


class Masking(NamedTuple):
    """The tensors that pack, mask and drop tokens of a call, and numbers that Triton may specialise on."""

    cu_seqlens_ptr: Any
    mask_ptr: Any
    stride_ms: Any
    seed_ptr: Any
    inverse_keep: Any  # 1 / (1 - dropout_p)


class Bias(NamedTuple):
    """The bias of the causal denominator, (nheads, seqlen)."""

    ptr: Any
    stride_h: Any
    stride_s: Any


class CacheState(NamedTuple):
    """The running sums of a cache, which a call advances; without one there are none."""

    energy_ptr: Any = None
    weighted_ptr: Any = None
    mass_ptr: Any = None
    lengths_ptr: Any = None


class ChunkSums(NamedTuple):
    """Sums over tokens: what the first and the second step left, added up, and where a step stores its chunk's."""

    first_ptr: Any = None
    second_ptr: Any = None
    parts_ptr: Any = None


class SequenceTokens(NamedTuple):
    """A sequence's tokens: a pointer to the first, and strides."""

    ptr: tl.tensor
    stride_s: tl.tensor
    stride_h: tl.tensor
    stride_d: tl.tensor


class TokenNumbers(NamedTuple):
    """A tensor with a number per head and token: a pointer to the first token's, and the stride of heads."""

    ptr: tl.tensor
    stride_h: tl.tensor


@triton.jit
def tokens_at(tensor, index, origin):
    """Return the tokens of sequence ``index``, whose first is row ``origin``; all of a packed tensor's for 0 and 0."""
    first = tensor.ptr + index * tensor.stride_b + origin * tensor.stride_s
    return SequenceTokens(first, tensor.stride_s, tensor.stride_h, tensor.stride_d)


@triton.jit
def of_heads(at, head):
    """Return tokens from head ``head`` on."""
    return SequenceTokens(at.ptr + head * at.stride_h, at.stride_s, at.stride_h, at.stride_d)


@triton.jit
def floored(x, FLOOR: tl.constexpr):
    """Return max(x, FLOOR), or NaN for NaN."""
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def chunk_of(number, cu_seqlens_ptr, nchunks, chunk_size, seqlen, total):
    """Return the sequence and chunk of a number, the sequence's first row and length, the chunk's first token and end.

    The tokens of a chunk are counted within the sequence.
    """
    index, chunk = number // nchunks, number % nchunks
    start, count = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, cu_seqlens_ptr is not None)
    first = chunk * chunk_size
    return index, chunk, start.to(tl.int64), count, first, tl.minimum(first + chunk_size, count)


@triton.jit
def heads_of(DIMS: tl.constexpr):
    """Return the numbers of a tile's heads, (BLOCK_H,)."""
    return tl.arange(0, DIMS.BLOCK_H)


@triton.jit
def channels_of(DIMS: tl.constexpr):
    """Return the numbers of a tile's channels, (BLOCK_D,)."""
    return tl.arange(0, DIMS.BLOCK_D)


@triton.jit
def _token_places(at, rows, DIMS: tl.constexpr):
    """Return pointers to a tile's elements, (BLOCK_N, BLOCK_H, BLOCK_D)."""
    places = rows.to(tl.int64)[:, None, None] * at.stride_s + heads_of(DIMS).to(tl.int64)[None, :, None] * at.stride_h
    return at.ptr + places + channels_of(DIMS).to(tl.int64)[None, None, :] * at.stride_d


@triton.jit
def _tokens_exist(there, DIMS: tl.constexpr):
    """Return which elements of a tile exist, (BLOCK_N, BLOCK_H, BLOCK_D), of the tokens that are ``there``."""
    channels = (heads_of(DIMS) < DIMS.NHEADS)[:, None] & (channels_of(DIMS) < DIMS.HEAD_DIM)[None, :]
    return there[:, None, None] & channels[None, :, :]


@triton.jit
def load_tokens(at, rows, end, DIMS: tl.constexpr):
    """Load a tile of tokens in fp32, (BLOCK_N, BLOCK_H, BLOCK_D)."""
    inside = _tokens_exist(rows < end, DIMS)
    return tl.load(_token_places(at, rows, DIMS), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(at, value, rows, there, DIMS: tl.constexpr):
    """Round a tile once and store the tokens that are ``there``."""
    tl.store(_token_places(at, rows, DIMS), value, mask=_tokens_exist(there, DIMS))


@triton.jit
def pick(x, at: tl.constexpr):
    """Return one token of a tile. Adding -0.0 changes no number, so that the compiler leaves it out."""
    return tl.sum(tl.where(tokens_of(x) == at, x, -0.0), 0)


@triton.jit
def tokens_of(x):
    """Return the numbers of a tile's tokens, of as many dimensions as the tile."""
    return tl.reshape(tl.arange(0, x.shape[0]), [x.shape[0]] + [1] * (len(x.shape) - 1))


@triton.jit
def first_of(is_first, initial, carried):
    """Return ``initial`` in a loop's first trip, then ``carried``; each is two sums by channel around one by head.

    What a loop begins with is laid out as memory wants it, and the whole loop would follow; selected, it is laid out as
    the loop's own numbers are.
    """
    return (
        tl.where(is_first, initial[0], carried[0]),
        tl.where(is_first, initial[1], carried[1]),
        tl.where(is_first, initial[2], carried[2]),
    )


@triton.jit
def load_apart(at, n, end, BLOCK_N: tl.constexpr, DIMS: tl.constexpr):
    """Load BLOCK_N tokens from ``n`` on like ``load_tokens``, but each by itself, so that a thread has all of them.

    Where tokens are one dimension of a load, Triton 3.6 puts them on neighbouring lanes.
    """
    if BLOCK_N > APART:
        return load_tokens(at, n + tl.arange(0, BLOCK_N), end, DIMS)
    else:
        parts = ()
        for token in tl.static_range(BLOCK_N):
            parts += (_load_token(at, n + token, end, DIMS),)
        for _level in tl.static_range(10):
            if len(parts) > 1:
                parts = _join_halves(parts)
        BLOCK_H: tl.constexpr = DIMS.BLOCK_H
        BLOCK_D: tl.constexpr = DIMS.BLOCK_D
        return tl.permute(tl.reshape(parts[0], (BLOCK_H, BLOCK_D, BLOCK_N)), (2, 0, 1))  # (BLOCK_N, BLOCK_H, BLOCK_D)


@triton.jit
def _join_halves(parts):
    """Join each tensor of the first half of a tuple with that of the second half, along a new last dimension."""
    pairs = ()
    for index in tl.static_range(len(parts) // 2):
        pairs += (tl.join(parts[index], parts[index + len(parts) // 2]),)
    return pairs


@triton.jit
def _load_token(at, n, end, DIMS: tl.constexpr):
    """Load token ``n``, (BLOCK_H, BLOCK_D)."""
    places, inside = _token_place(at, n, end, DIMS)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _token_place(at, n, end, DIMS: tl.constexpr):
    """Return pointers to token ``n``, and which of its elements exist."""
    places = heads_of(DIMS).to(tl.int64)[:, None] * at.stride_h + channels_of(DIMS).to(tl.int64)[None, :] * at.stride_d
    inside = (heads_of(DIMS) < DIMS.NHEADS)[:, None] & (channels_of(DIMS) < DIMS.HEAD_DIM)[None, :] & (n < end)
    return at.ptr + tl.cast(n, tl.int64) * at.stride_s + places, inside


@triton.jit
def store_apart(at, value, n, end, BLOCK_N: tl.constexpr, DIMS: tl.constexpr):
    """Store a tile as ``load_apart`` loads one, rounded once."""
    if BLOCK_N > APART:
        rows = n + tl.arange(0, BLOCK_N)
        store_tokens(at, value, rows, rows < end, DIMS)
    else:
        for token in tl.static_range(BLOCK_N):
            places, inside = _token_place(at, n + token, end, DIMS)
            tl.store(places, pick(value, token), mask=inside)


@triton.jit
def _row_places(at, rows, there, DIMS: tl.constexpr):
    """Return pointers to a number per token and head, (BLOCK_N, BLOCK_H), and which of them exist."""
    heads = heads_of(DIMS)
    places = at.ptr + rows.to(tl.int64)[:, None] + heads.to(tl.int64)[None, :] * at.stride_h
    return places, there[:, None] & (heads < DIMS.NHEADS)[None, :]


@triton.jit
def load_rows(at, rows, end, DIMS: tl.constexpr):
    """Load a number per token and head, (BLOCK_N, BLOCK_H)."""
    places, inside = _row_places(at, rows, rows < end, DIMS)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_rows(at, value, rows, there, DIMS: tl.constexpr):
    """Store a number per token and head, of the tokens that are ``there``."""
    places, inside = _row_places(at, rows, there, DIMS)
    tl.store(places, value, mask=inside)


@triton.jit
def kept(mask_ptr, rows, end, stride_ms):
    """Return the 0/1 factor of each token in the sums over tokens, (BLOCK_N,)."""
    inside = rows < end
    if mask_ptr is None:
        return inside.to(tl.float32)
    else:
        return tl.load(mask_ptr + rows.to(tl.int64) * stride_ms, mask=inside, other=0).to(tl.float32)


@triton.jit
def counted(x, keep, mask_ptr):
    """Return a tile times each token's factor ``keep`` in the sums; without a mask, tokens past the end are zero."""
    if mask_ptr is None:
        return x
    elif len(x.shape) == 3:
        return x * keep[:, None, None]
    else:
        return x * keep[:, None]


@triton.jit
def load_channels(ptr, DIMS: tl.constexpr):
    """Load a contiguous (NHEADS, HEAD_DIM) of sums as (BLOCK_H, BLOCK_D)."""
    heads, channels = heads_of(DIMS)[:, None], channels_of(DIMS)[None, :]
    return tl.load(
        ptr + heads * DIMS.HEAD_DIM + channels, mask=(heads < DIMS.NHEADS) & (channels < DIMS.HEAD_DIM), other=0.0
    )


@triton.jit
def store_channels(ptr, value, DIMS: tl.constexpr):
    """Store what ``load_channels`` loads."""
    heads, channels = heads_of(DIMS)[:, None], channels_of(DIMS)[None, :]
    tl.store(ptr + heads * DIMS.HEAD_DIM + channels, value, mask=(heads < DIMS.NHEADS) & (channels < DIMS.HEAD_DIM))


@triton.jit
def load_heads(ptr, DIMS: tl.constexpr):
    """Load a contiguous (NHEADS,) in fp32 as (BLOCK_H,)."""
    return tl.load(ptr + heads_of(DIMS), mask=heads_of(DIMS) < DIMS.NHEADS, other=0.0).to(tl.float32)


@triton.jit
def store_heads(ptr, value, DIMS: tl.constexpr):
    """Store what ``load_heads`` loads."""
    tl.store(ptr + heads_of(DIMS), value, mask=heads_of(DIMS) < DIMS.NHEADS)


@triton.jit
def add_channels(ptr, value, DIMS: tl.constexpr):
    """Add to what ``load_channels`` loads, in its dtype."""
    old = load_channels(ptr, DIMS)  # (BLOCK_H, BLOCK_D)
    store_channels(ptr, old + value.to(old.dtype), DIMS)


@triton.jit
def add_heads(ptr, value, DIMS: tl.constexpr):
    """Add to a contiguous (NHEADS,), in its dtype."""
    heads = heads_of(DIMS)
    old = tl.load(ptr + heads, mask=heads < DIMS.NHEADS, other=0.0)  # (BLOCK_H,)
    store_heads(ptr, old + value.to(old.dtype), DIMS)


@triton.jit
def load_sums(ptr, number, DIMS: tl.constexpr):
    """Load set ``number`` of sums over tokens: one per channel, and behind them one per head."""
    row = ptr + number.to(tl.int64) * (DIMS.NHEADS * (DIMS.HEAD_DIM + 1))
    return load_channels(row, DIMS), load_heads(row + DIMS.NHEADS * DIMS.HEAD_DIM, DIMS)


@triton.jit
def store_sums(ptr, number, by_channel, by_head, DIMS: tl.constexpr):
    """Store what ``load_sums`` loads."""
    row = ptr + number.to(tl.int64) * (DIMS.NHEADS * (DIMS.HEAD_DIM + 1))
    store_channels(row, by_channel, DIMS)
    store_heads(row + DIMS.NHEADS * DIMS.HEAD_DIM, by_head, DIMS)


@triton.jit
def dropped(x, seed_ptr, drop_last, inverse_keep, index, rows, DIMS: tl.constexpr):
    """Return a tile times the dropout factor of each of its elements; ``rows`` count within the sequence."""
    # The seed is loaded in each trip of a loop. Loaded before it, Philox's 20 round keys stay in registers: the forward
    # of 64 channels takes 167 of them on sm_90, in place of 127.
    head = (index * DIMS.NHEADS + heads_of(DIMS))[None, :, None]
    row = rows[:, None, None] + heads_of(DIMS)[None, :, None] * 0
    keep = keep_mask(tl.load(seed_ptr), head, row, channels_of(DIMS)[None, None, :], drop_last)
    return tl.where(keep, x * inverse_keep, 0.0)


@triton.jit
def clear_uncovered(
    tokens_at, rows_at, cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N: tl.constexpr, DIMS: tl.constexpr
):
    """Write zeros to the packed rows between sequence ``index`` and the next one, and to those before the first.

    ``tokens_at`` and ``rows_at``, which may be None, are the whole tensors. Mostly there is no such row.
    """
    BLOCK_H: tl.constexpr = DIMS.BLOCK_H
    BLOCK_D: tl.constexpr = DIMS.BLOCK_D
    lead, first, end = uncovered(cu_seqlens_ptr, index, nsequences, seqlen, total)
    for n in tl.range(tl.where(lead > 0, 0, first), end, BLOCK_N):
        rows = n + tl.arange(0, BLOCK_N)
        outside = (rows < end) & ((rows < lead) | (rows >= first))
        store_tokens(tokens_at, tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32), rows, outside, DIMS)
        if rows_at is not None:
            store_rows(rows_at, tl.zeros((BLOCK_N, BLOCK_H), tl.float32), rows, outside, DIMS)
