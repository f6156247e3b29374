"""Running sums over tokens: within a tile, up to a tile, and from chunk to chunk, which are summed first.

The order of every sum is fixed by the places of tokens and chunks, never by what the GPU does first.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.tssa.triton import quotients, tile

_COLUMNS = 128  # sums side by side that a program adds up
# Chunks of which it loads them at a time: 16 kB in 241 registers, so that a multiprocessor has 8 programs. 16 chunks
# take 128 registers: 16 programs, and as many bytes in flight. But 32 sequences of 768 channels are 224 programs, two
# for each: with 32 chunks they have an H200's 20 kB (4.3 TB/s, 0.6 us) in flight; with 16 not, and they wait twice.
_AHEAD = 32


@triton.jit
def earlier_sums(before, x):
    """Return the sums over the tokens before each one, the first dimension, and what is ``before`` all of them.

    One addition per element and no exchange where a thread has all tokens of its channels: the selections are decided
    when this is compiled. ``tl.cumsum``, for tiles of many tokens, goes through warp shuffles in Triton 3.6, and
    reversed in all versions.
    """
    if x.shape[0] > tile.APART:
        return before[None] + (tl.cumsum(x, 0) - x)
    else:
        token = tile.tokens_of(x)
        sums = tl.where(token == 0, before[None], x)
        for at in tl.static_range(1, x.shape[0]):
            sums = tl.where(token == at, tile.pick(sums + x, at - 1)[None], sums)
        return sums


@triton.jit
def later_sums(after, x):
    """Return the sums over the tokens after each one, and what is ``after`` all of them."""
    LAST: tl.constexpr = x.shape[0] - 1
    if LAST >= tile.APART:
        return after[None] + (tl.cumsum(x, 0, reverse=True) - x)
    else:
        token = tile.tokens_of(x)
        sums = tl.where(token == LAST, after[None], x)
        for back in tl.static_range(LAST):
            sums = tl.where(token == LAST - 1 - back, tile.pick(sums + x, LAST - back)[None], sums)
        return sums


@triton.jit
def before_chunk(ptr, pid, chunk, ngroups, DIMS: tl.constexpr):
    """Return the sums over the chunks before ``chunk``, of which ``ptr`` has those up to each one, by ``ngroups``."""
    by_channel, by_head = tile.load_sums(ptr, pid - (chunk > 0) * ngroups, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
    return tl.where(chunk > 0, by_channel, 0.0), tl.where(chunk > 0, by_head, 0.0)


@triton.jit
def all_before_chunk(totals_ptr, energies_ptr, pid, chunk, ngroups, DIMS: tl.constexpr):
    """Return the sums of Pi w^2, of Pi and of w^2 over the chunks before ``chunk``."""
    moment, mass = before_chunk(totals_ptr, pid, chunk, ngroups, DIMS)
    energy, _ = before_chunk(energies_ptr, pid, chunk, ngroups, DIMS)
    return moment, mass, energy


@triton.jit
def after_chunk(ptr, pid, chunk, nchunks, ngroups, DIMS: tl.constexpr):
    """Return the sums over the chunks after ``chunk``, of which ``ptr`` has those from each one on, by ``ngroups``."""
    there = chunk + 1 < nchunks
    by_channel, by_head = tile.load_sums(ptr, pid + there * ngroups, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
    return tl.where(there, by_channel, 0.0), tl.where(there, by_head, 0.0)


@triton.jit
def load_mark(ptr, number, DIMS: tl.constexpr):
    """Load the sums of Pi w^2, of Pi and of w^2 up to a mark."""
    moment, mass = tile.load_sums(ptr, 2 * number, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
    energy, _ = tile.load_sums(ptr, 2 * number + 1, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
    return moment, mass, energy


@triton.jit
def store_mark(ptr, number, sums, DIMS: tl.constexpr):
    """Store what ``load_mark`` loads."""
    moment, mass, energy = sums
    tile.store_sums(ptr, 2 * number, moment, mass, DIMS)
    tile.store_sums(ptr, 2 * number + 1, energy, mass, DIMS)


@triton.jit
def add_tokens(
    sums,
    w_at,
    membership_at,
    mask_ptr,
    stride_ms,
    first,
    last,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add tokens ``first`` to ``last`` to the sums of Pi w^2, of Pi and of w^2; those of squares are times SHIFT."""
    moment, mass, energy = sums
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
        keep = tile.kept(mask_ptr, rows, last, stride_ms)  # (BLOCK_N,)
        weights = tile.counted(tile.load_rows(membership_at, rows, last, DIMS), keep, mask_ptr)  # (BLOCK_N, BLOCK_H)
        squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
        moment += tl.sum(squares * (weights * tile.SHIFT)[:, :, None], 0)
        mass += tl.sum(weights, 0)
        energy += tl.sum(tile.counted(squares * tile.SHIFT, keep, mask_ptr), 0)
    return moment, mass, energy


@triton.jit
def through_moment(w, g, members, weights, moment, mass, DIMS: tl.constexpr):
    """Return the gradients through M of a tile, and the sums of Pi w^2 and of Pi up to its end.

    These are g A and g A w (both by element), dM / s (by element) and the terms of V (by token and head).
    """
    earlier_masses = earlier_sums(mass, weights)  # (BLOCK_N, BLOCK_H)
    weighted = (weights * tile.SHIFT)[:, :, None] * (w * w)  # (BLOCK_N, BLOCK_H, BLOCK_D)
    masses, moments = earlier_masses + weights, earlier_sums(moment, weighted) + weighted
    floored = masses + tile.MASS_FLOOR  # (BLOCK_N, BLOCK_H)
    shifted = (floored * tile.SHIFT)[:, :, None]  # (BLOCK_N, BLOCK_H, 1)
    # A = 1 / (1 + M) without the division of M.
    inverse = quotients.reciprocal(moments + shifted, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
    gate = g * (inverse * shifted)  # (BLOCK_N, BLOCK_H, BLOCK_D)
    product = gate * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
    per_mass = product * inverse  # (BLOCK_N, BLOCK_H, BLOCK_D)
    slope = per_mass * (members * tile.SHIFT)[:, :, None]  # (BLOCK_N, BLOCK_H, BLOCK_D)
    dmasses = -tl.sum(per_mass * moments, 2) * (members / floored)  # (BLOCK_N, BLOCK_H)
    LAST: tl.constexpr = w.shape[0] - 1
    return gate, product, slope, dmasses, tile.pick(moments, LAST), tile.pick(masses, LAST)


@triton.jit(do_not_specialize=("nchunks", "size"))
def _scan_chunks_kernel(
    sums_ptr,
    nchunks,
    size,
    REVERSE: tl.constexpr,
    BY_FOUR: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Add up (nchunks, size) sums over the chunks up to each one, or from each one on, in place.

    In float64: thousands of chunks would each round a float32 total once. BLOCK_C chunks are on the way at a time.
    BY_FOUR: ``size`` is a multiple of 4, so that a thread has four neighbouring sums.
    """
    if BY_FOUR:
        size = size // 4 * 4
    nblocks = tl.cdiv(size, BLOCK_X)
    pid = tl.program_id(0)
    columns = (pid % nblocks) * BLOCK_X + tl.arange(0, BLOCK_X)
    there = columns < size
    sums_ptr += (pid // nblocks).to(tl.int64) * nchunks * size
    step = size
    if REVERSE:
        sums_ptr += (nchunks - 1).to(tl.int64) * size
        step = -size
    carried = tl.zeros((BLOCK_X,), tl.float64)
    for c in tl.range(0, nchunks, BLOCK_C):
        values = ()
        for ahead in tl.static_range(BLOCK_C):
            at = sums_ptr + tl.cast(c + ahead, tl.int64) * step + columns
            values += (tl.load(at, mask=there & (c + ahead < nchunks), other=0.0),)
        for ahead in tl.static_range(BLOCK_C):
            at = sums_ptr + tl.cast(c + ahead, tl.int64) * step + columns
            carried += values[ahead].to(tl.float64)
            tl.store(at, carried.to(tl.float32), mask=there & (c + ahead < nchunks))


def scan_chunks(sums: Tensor, reverse: bool = False) -> Tensor:
    """Add up (..., nchunks, size) in place over the chunks up to each one, or from each one on; return it."""
    nchunks, size = sums.shape[-2:]
    if nchunks == 1:
        return sums
    rows = sums.numel() // (nchunks * size) if sums.numel() else 0
    by_four = size % 4 == 0
    launch.run(
        _scan_chunks_kernel,
        rows * triton.cdiv(size, _COLUMNS),
        sums_ptr=sums,
        nchunks=nchunks,
        size=size,
        REVERSE=reverse,
        BY_FOUR=by_four,
        BLOCK_C=min(triton.next_power_of_2(nchunks), _AHEAD),
        BLOCK_X=_COLUMNS,
        num_warps=1 if by_four else 4,
    )
    return sums
