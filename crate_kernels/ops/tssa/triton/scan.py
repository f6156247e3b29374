"""Running sums over tokens: within a tile, up to a tile, and from chunk to chunk, which are summed first.

The order of every sum is fixed by the places of tokens and chunks, never by what the GPU does first.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.tssa.triton import tile

_COLUMNS = 128


@triton.jit
def before_chunk(ptr, pid, chunk, DIMS: tl.constexpr):
    """Return the sums over the chunks before ``chunk``, of which ``ptr`` has those up to each one."""
    by_channel, by_head = tile.load_sums(ptr, pid - (chunk > 0), DIMS)
    return tl.where(chunk > 0, by_channel, 0.0), tl.where(chunk > 0, by_head, 0.0)


@triton.jit
def all_before_chunk(totals_ptr, energies_ptr, pid, chunk, DIMS: tl.constexpr):
    """Return the sums of Pi w^2, of Pi and of w^2 over the chunks before ``chunk``."""
    moment, mass = before_chunk(totals_ptr, pid, chunk, DIMS)
    energy, _ = before_chunk(energies_ptr, pid, chunk, DIMS)
    return moment, mass, energy


@triton.jit
def after_chunk(ptr, pid, chunk, nchunks, DIMS: tl.constexpr):
    """Return the sums over the chunks after ``chunk``, of which ``ptr`` has those from each one on."""
    there = chunk + 1 < nchunks
    by_channel, by_head = tile.load_sums(ptr, pid + there, DIMS)
    return tl.where(there, by_channel, 0.0), tl.where(there, by_head, 0.0)


@triton.jit
def load_mark(ptr, number, DIMS: tl.constexpr):
    """Load the sums of Pi w^2, of Pi and of w^2 up to a mark."""
    moment, mass = tile.load_sums(ptr, 2 * number, DIMS)
    energy, _ = tile.load_sums(ptr, 2 * number + 1, DIMS)
    return moment, mass, energy


@triton.jit
def store_mark(ptr, number, sums, DIMS: tl.constexpr):
    """Store what ``load_mark`` loads."""
    moment, mass, energy = sums
    tile.store_sums(ptr, 2 * number, moment, mass, DIMS)
    tile.store_sums(ptr, 2 * number + 1, energy, mass, DIMS)


@triton.jit
def _join_blocks(sums, totals, SIZE: tl.constexpr):
    """Join blocks of SIZE tokens in pairs: the first of each adds the total of the second to its sums."""
    PAIRS: tl.constexpr = totals.shape[0] // 2
    half = tl.arange(0, 2)[None, :, None, None]
    totals = tl.reshape(totals, (PAIRS, 2, totals.shape[1], totals.shape[2]))
    later = tl.sum(tl.where(half == 1, totals, 0.0), 1)
    sums = tl.reshape(sums, (PAIRS, 2, SIZE, totals.shape[2], totals.shape[3]))
    sums += tl.where(half == 0, later[:, None, :, :], 0.0)[:, :, None, :, :]
    return sums, tl.sum(totals, 1)


@triton.jit
def suffix_sums(x):
    """Return the sums over tokens, the first of three dimensions, from each one on, by doubling blocks of tokens.

    ``tl.cumsum(reverse=True)`` turns a tile around and back by ten warp shuffles per element, whatever its layout.
    This takes none where a thread has all tokens of its channels.
    """
    sums, totals = x, x
    for level in tl.static_range(10):
        if (1 << level) < x.shape[0]:
            sums, totals = _join_blocks(sums, totals, 1 << level)
    return tl.reshape(sums, x.shape)


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
    """Add tokens ``first`` to ``last`` to the sums of Pi w^2, of Pi and of w^2."""
    moment, mass, energy = sums
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        w = tile.load_tokens(w_at, rows, last, DIMS)
        keep = tile.kept(mask_ptr, rows, last, stride_ms)
        weights = tile.counted(tile.load_rows(membership_at, rows, last, DIMS), keep, mask_ptr)
        moment += tl.sum(w * w * weights[:, :, None], 0)
        mass += tl.sum(weights, 0)
        energy += tl.sum(tile.counted(w * w, keep, mask_ptr), 0)
    return moment, mass, energy


@triton.jit
def through_moment(w, g, members, weights, moment, mass, DIMS: tl.constexpr):
    """Return g A, dM / s (both by element) and the terms of V (by token and head) of a tile."""
    masses = mass[None, :] + tl.cumsum(weights, 0) + tile.MASS_FLOOR
    moments = moment[None, :, :] + tl.cumsum(w * w * weights[:, :, None], 0)
    shifted = masses * tile.SHIFT
    inverse = tile.reciprocal(moments * tile.SHIFT + shifted[:, :, None], DIMS)
    gate = g * inverse * shifted[:, :, None]
    slope = gate * w * inverse * (members * tile.SHIFT)[:, :, None]
    return gate, slope, -tl.sum(slope * moments, 2) / masses


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


def scan_chunks(sums: Tensor, reverse: bool = False) -> Tensor:
    """Add up (..., nchunks, size) in place over the chunks up to each one, or from each one on; return it."""
    nchunks, size = sums.shape[-2:]
    if nchunks == 1:
        return sums
    rows = sums.numel() // (nchunks * size) if sums.numel() else 0
    launch.run(
        _scan_chunks_kernel,
        rows * triton.cdiv(size, _COLUMNS),
        sums_ptr=sums,
        nchunks=nchunks,
        size=size,
        REVERSE=reverse,
        BLOCK_C=16,
        BLOCK_X=_COLUMNS,
        num_warps=4,
    )
    return sums
