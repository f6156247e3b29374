"""The causal form in Triton, forward: running sums over tokens, in chunks that are summed first.

One program goes through a chunk in tiles and carries the running sums in registers. Where a sequence is one chunk
(short ones, very many, and decoding) that is all: w is read once. Where it is several, their sums of w^2 come first,
then the membership and the sums of Pi w^2, then the output; ``scan_chunks`` adds up what comes before each chunk.

Traffic as (read, written). A pass is batch * nheads * seqlen * head_dim * itemsize bytes; a row, as the membership is,
batch * nheads * seqlen * 4 bytes. There is no matrix product.

====== ====== ===== ========
way    passes rows  launches
====== ====== ===== ========
alone  1, 1   0, 1  1
chunks 3, 1   1, 1  5
====== ====== ===== ========

Chunks add two sets of sums, 1 / CHUNK of a pass each, in fp32, each written twice and read twice. No bit of a token's
output depends on a later token: every running sum is added in the order of the tokens.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels.ops.tssa import given
from crate_kernels.ops.tssa.call import Call
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.launch import RUNTIME, Launch, run_causal
from crate_kernels.ops.tssa.triton.scan import before_chunk, earlier_sums
from crate_kernels.ops.tssa.triton.tile import Dims, Rows, Tokens


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_fwd_kernel(
    w_ptr,
    temp_ptr,
    bias_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    out_ptr,
    membership_ptr,
    energy_ptr,
    weighted_ptr,
    mass_ptr,
    lengths_ptr,
    sums_1_ptr,
    sums_2_ptr,
    parts_ptr,
    stride_wb,
    stride_ws,
    stride_wh,
    stride_wd,
    stride_bh,
    stride_bs,
    stride_mb,
    stride_ms,
    stride_ob,
    stride_os,
    stride_oh,
    stride_pb,
    stride_ph,
    nsequences,
    nchunks,
    chunk_size,
    seqlen,
    total,
    bias_tokens,
    drop_last,
    inverse_keep,
    ENERGY: tl.constexpr,
    MEMBERS: tl.constexpr,
    OUTPUT: tl.constexpr,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do ENERGY, MEMBERS or OUTPUT on chunk ``pid % nchunks`` of a sequence, or the latter two on a whole one.

    ENERGY stores the chunk's sums of w^2 and number of kept tokens to ``parts_ptr``, MEMBERS its sums of Pi w^2 and Pi.
    ``sums_1_ptr`` and ``sums_2_ptr`` have these added up to each chunk. The state of a cache, if any, comes before the
    first token; a program with the whole sequence also advances it, by sums of its own tokens: in what it carries, the
    state is rounded to float32.
    """
    DIMS: tl.constexpr = Dims(NHEADS, HEAD_DIM, BLOCK_H, BLOCK_D, PTX, w_ptr.dtype.element_ty == tl.float32)
    PACKED: tl.constexpr = cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk, origin, _count, first, last = tile.chunk_of(pid, cu_seqlens_ptr, nchunks, chunk_size, seqlen, total)
    index64 = index.to(tl.int64)
    heads = tile.heads_of(DIMS)
    w_at = Tokens(w_ptr + index64 * stride_wb + origin * stride_ws, stride_ws, stride_wh, stride_wd)
    out_at = Tokens(out_ptr + index64 * stride_ob + origin * stride_os, stride_os, stride_oh, 1)
    membership_at = Rows(membership_ptr + index64 * stride_pb + origin, stride_ph)
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb
    by_channel, by_head = index64 * (NHEADS * HEAD_DIM), index64 * NHEADS  # offsets into the state of a cache

    energy, moment = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    mass, keys, before_keys = tl.zeros((BLOCK_H,), tl.float32), 0.0, tl.zeros((BLOCK_H,), tl.float32)
    new_energy, new_moment, new_mass = energy, moment, mass  # of the tokens that advance a state
    position = 0
    if MEMBERS and sums_1_ptr is not None:
        energy, before_keys = before_chunk(sums_1_ptr, pid, chunk, 1, DIMS)
    if OUTPUT and sums_2_ptr is not None:
        moment, mass = before_chunk(sums_2_ptr, pid, chunk, 1, DIMS)
    if lengths_ptr is not None:
        position = tl.maximum(tl.load(lengths_ptr + index), 0)
        before_keys += position
    temp = tile.load_heads(temp_ptr, DIMS)
    # Running sums are carried in the scale in which their reciprocals are taken. Those of a chunk alone begin with 0.
    if MEMBERS:
        if lengths_ptr is not None:
            energy += tile.load_channels(energy_ptr + by_channel, DIMS).to(tl.float32)
        energy *= tile.SHIFT
    if OUTPUT:
        if lengths_ptr is not None:
            moment += tile.load_channels(weighted_ptr + by_channel, DIMS).to(tl.float32)
            mass += tile.load_heads(mass_ptr + by_head, DIMS)
        moment *= tile.SHIFT

    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)
        keep = tile.kept(mask_ptr, rows, last, stride_ms)
        squares = w * w
        counted = tile.counted(squares, keep, mask_ptr)
        if MEMBERS:
            running = earlier_sums(energy, counted * tile.SHIFT) + counted * tile.SHIFT
            energy = tile.pick(running, BLOCK_N - 1)
            ratio = quotients.quotient_of(squares, tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT), DIMS)
            similarity = tile.sum_over_channels(ratio, DIMS) * tile.SHIFT
            if bias_ptr is not None:
                # Only padded tokens, whose output nobody reads, are past the end.
                at = tl.minimum(position + rows, bias_tokens - 1).to(tl.int64)[:, None] * stride_bs
                there = (rows < last)[:, None] & (heads < NHEADS)[None, :]
                bias = tl.load(bias_ptr + at + heads.to(tl.int64)[None, :] * stride_bh, mask=there, other=0.0)
                similarity += HEAD_DIM * bias.to(similarity.dtype)
            members = tile.softmax_over_heads(temp, similarity, rows < last, DIMS)
            if mask_ptr is not None:
                # Before the first kept token, out and every gradient vanish with the membership.
                seen = before_keys[None, :] + (keys + tl.cumsum(keep, 0))[:, None] > 0
                members = tl.where(seen, members, 0.0)
            tile.store_rows(membership_at, members, rows, rows < last, DIMS)
        elif OUTPUT:
            members = tile.load_rows(membership_at, rows, last, DIMS)
        else:
            energy += tl.sum(counted, 0)
        keys += tl.sum(keep, 0)
        if MEMBERS and lengths_ptr is not None:
            new_energy += tl.sum(counted, 0)
        if MEMBERS or OUTPUT:
            weights = tile.counted(members, keep, mask_ptr)
            if OUTPUT:
                weighted = (weights * tile.SHIFT)[:, :, None] * squares
                moments = earlier_sums(moment, weighted) + weighted
                masses = earlier_sums(mass, weights) + weights
                moment, mass = tile.pick(moments, BLOCK_N - 1), tile.pick(masses, BLOCK_N - 1)
                if lengths_ptr is not None:
                    new_moment += tl.sum(weighted, 0)
                    new_mass += tl.sum(weights, 0)
                shifted = (masses + tile.MASS_FLOOR) * tile.SHIFT
                # A = 1 / (1 + M) without the division of M.
                out = w * (-members * shifted)[:, :, None] * quotients.reciprocal(moments + shifted[:, :, None], DIMS)
                if seed_ptr is not None:
                    out = tile.dropped(out, seed_ptr, drop_last, inverse_keep, index, rows, DIMS)
                tile.store_tokens(out_at, out, rows, rows < last, DIMS)
            else:
                moment += tl.sum(weights[:, :, None] * squares, 0)
                mass += tl.sum(weights, 0)

    if ENERGY:
        tile.store_sums(parts_ptr, pid, energy, keys + tl.zeros((BLOCK_H,), tl.float32), DIMS)
    elif MEMBERS and not OUTPUT:
        tile.store_sums(parts_ptr, pid, moment, mass, DIMS)
    elif MEMBERS and lengths_ptr is not None:
        # Every thread reads the state before any replaces it.
        tl.debug_barrier()
        tile.add_channels(energy_ptr + by_channel, new_energy, DIMS)
        tile.add_channels(weighted_ptr + by_channel, new_moment / tile.SHIFT, DIMS)
        tile.add_heads(mass_ptr + by_head, new_mass, DIMS)
        tl.store(lengths_ptr + index, position + keys.to(tl.int32))
    if PACKED and OUTPUT and chunk == 0:
        out_at = Tokens(out_ptr, stride_os, stride_oh, 1)
        membership_at = Rows(membership_ptr, stride_ph)
        tile.clear_uncovered(out_at, membership_at, cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS)


def causal_arguments(
    sizes: Launch, w: Tensor, temp: Tensor, denom_bias: Tensor | None, out: Tensor, membership: Tensor
) -> dict[str, object]:
    """Return the arguments that the forward and decoding share; they have no state."""
    bias = (0, 0) if denom_bias is None else denom_bias.stride()
    return {
        "w_ptr": w,
        "temp_ptr": temp.contiguous(),
        "bias_ptr": denom_bias,
        "out_ptr": out,
        "membership_ptr": membership,
        "energy_ptr": None,
        "weighted_ptr": None,
        "mass_ptr": None,
        "lengths_ptr": None,
        "stride_bh": bias[0],
        "stride_bs": bias[1],
        "bias_tokens": 0 if denom_bias is None else denom_bias.shape[1],
        **sizes.arguments(),
        **sizes.strides("w", w),
        **sizes.strides("o", out, contiguous=True),
    }


def forward_causal(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """Return out and membership of the causal form."""
    given.forward_causal(w, temp, denom_bias, call)
    sizes = Launch(w, call)
    out, membership = operator.empty_out(w), sizes.empty_rows()
    run_causal(_tssa_causal_fwd_kernel, sizes, causal_arguments(sizes, w, temp, denom_bias, out, membership))
    return out, membership
