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
# pyright: reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.sums import saved_sums
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.launch import RUNTIME, TokenSizes, run_causal
from crate_kernels.ops.tssa.triton.members import softmax_over_heads, sum_over_channels
from crate_kernels.ops.tssa.triton.scan import before_chunk, earlier_sums
from crate_kernels.ops.tssa.triton.tile import Bias, CacheState, TokenNumbers


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_fwd_kernel(
    w_tokens, out_tokens, temp_ptr, bias, membership_ptr, state, sums, masking, stride_mb, stride_pb, stride_ph,
    nsequences, nchunks, chunk_size, seqlen, total, bias_tokens, drop_last,
    ENERGY: tl.constexpr, MEMBERS: tl.constexpr, OUTPUT: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do ENERGY, MEMBERS or OUTPUT on chunk ``pid % nchunks`` of a sequence, or the latter two on a whole one.

    ENERGY stores the chunk's sums of w^2 and number of kept tokens, MEMBERS those of Pi w^2 and Pi; ``sums`` has these
    added up to each chunk. The state of a cache, if any, comes before the first token; a program with the whole
    sequence also advances it, by sums of its own tokens: in what it carries, the state is rounded to float32.
    """
    BLOCK_H: tl.constexpr = DIMS.BLOCK_H
    BLOCK_D: tl.constexpr = DIMS.BLOCK_D
    PACKED: tl.constexpr = masking.cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk, origin, _count, first, last = tile.chunk_of(
        pid, masking.cu_seqlens_ptr, nchunks, chunk_size, seqlen, total
    )
    index64 = index.to(tl.int64)
    heads = tile.heads_of(DIMS)
    w_at, out_at = tile.tokens_at(w_tokens, index64, origin), tile.tokens_at(out_tokens, index64, origin)
    membership_at = TokenNumbers(membership_ptr + index64 * stride_pb + origin, stride_ph)
    mask_ptr = masking.mask_ptr
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb
    # Offsets into the state of a cache.
    by_channel, by_head = index64 * (DIMS.NHEADS * DIMS.HEAD_DIM), index64 * DIMS.NHEADS

    energy, moment = (
        tl.zeros((BLOCK_H, BLOCK_D), tl.float32),
        tl.zeros((BLOCK_H, BLOCK_D), tl.float32),
    )
    mass, keys, before_keys = tl.zeros((BLOCK_H,), tl.float32), 0.0, tl.zeros((BLOCK_H,), tl.float32)
    new_energy, new_moment, new_mass = energy, moment, mass  # of the tokens that advance a state
    position = 0
    if MEMBERS and sums.first_ptr is not None:
        energy, before_keys = before_chunk(sums.first_ptr, pid, chunk, 1, DIMS)
    if OUTPUT and sums.second_ptr is not None:
        moment, mass = before_chunk(sums.second_ptr, pid, chunk, 1, DIMS)
    if state.lengths_ptr is not None:
        position = tl.maximum(tl.load(state.lengths_ptr + index), 0)
        before_keys += position
    temp = tile.load_heads(temp_ptr, DIMS)  # (BLOCK_H,)
    # Running sums are carried in the scale in which their reciprocals are taken. Those of a chunk alone begin with 0.
    if MEMBERS:
        if state.lengths_ptr is not None:
            energy += tile.load_channels(state.energy_ptr + by_channel, DIMS).to(tl.float32)
        energy *= tile.SHIFT
    if OUTPUT:
        if state.lengths_ptr is not None:
            moment += tile.load_channels(state.weighted_ptr + by_channel, DIMS).to(tl.float32)
            mass += tile.load_heads(state.mass_ptr + by_head, DIMS)
        moment *= tile.SHIFT

    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
        keep = tile.kept(mask_ptr, rows, last, masking.stride_ms)  # (BLOCK_N,)
        squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
        counted = tile.counted(squares, keep, mask_ptr)  # (BLOCK_N, BLOCK_H, BLOCK_D)
        if MEMBERS:
            running = earlier_sums(energy, counted * tile.SHIFT) + counted * tile.SHIFT  # (BLOCK_N, BLOCK_H, BLOCK_D)
            energy = tile.pick(running, BLOCK_N - 1)  # (BLOCK_H, BLOCK_D)
            ratio = quotients.quotient_of(squares, tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT), DIMS)
            similarity = sum_over_channels(ratio, DIMS) * tile.SHIFT  # (BLOCK_N, BLOCK_H)
            if bias.ptr is not None:
                # Only padded tokens, whose output nobody reads, are past the end.
                at = tl.minimum(position + rows, bias_tokens - 1).to(tl.int64)[:, None] * bias.stride_s
                there = (rows < last)[:, None] & (heads < DIMS.NHEADS)[None, :]
                terms = tl.load(bias.ptr + at + heads.to(tl.int64)[None, :] * bias.stride_h, mask=there, other=0.0)
                similarity += DIMS.HEAD_DIM * terms.to(similarity.dtype)
            members = softmax_over_heads(temp, similarity, rows < last, DIMS)  # (BLOCK_N, BLOCK_H)
            if mask_ptr is not None:
                # Before the first kept token, out and every gradient vanish with the membership.
                seen = before_keys[None, :] + (keys + tl.cumsum(keep, 0))[:, None] > 0  # (BLOCK_N, BLOCK_H)
                members = tl.where(seen, members, 0.0)
            tile.store_rows(membership_at, members, rows, rows < last, DIMS)
        elif OUTPUT:
            members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
        else:
            energy += tl.sum(counted, 0)
        keys += tl.sum(keep, 0)
        if MEMBERS and state.lengths_ptr is not None:
            new_energy += tl.sum(counted, 0)
        if MEMBERS or OUTPUT:
            weights = tile.counted(members, keep, mask_ptr)  # (BLOCK_N, BLOCK_H)
            if OUTPUT:
                weighted = (weights * tile.SHIFT)[:, :, None] * squares  # (BLOCK_N, BLOCK_H, BLOCK_D)
                moments = earlier_sums(moment, weighted) + weighted  # (BLOCK_N, BLOCK_H, BLOCK_D)
                masses = earlier_sums(mass, weights) + weights  # (BLOCK_N, BLOCK_H)
                moment, mass = tile.pick(moments, BLOCK_N - 1), tile.pick(masses, BLOCK_N - 1)
                if state.lengths_ptr is not None:
                    new_moment += tl.sum(weighted, 0)
                    new_mass += tl.sum(weights, 0)
                shifted = (masses + tile.MASS_FLOOR) * tile.SHIFT  # (BLOCK_N, BLOCK_H)
                # A = 1 / (1 + M) without the division of M.
                out = w * (-members * shifted)[:, :, None] * quotients.reciprocal(moments + shifted[:, :, None], DIMS)
                if masking.seed_ptr is not None:
                    out = tile.dropped(out, masking.seed_ptr, drop_last, masking.inverse_keep, index, rows, DIMS)
                tile.store_tokens(out_at, out, rows, rows < last, DIMS)
            else:
                moment += tl.sum(weights[:, :, None] * squares, 0)
                mass += tl.sum(weights, 0)

    if ENERGY:
        tile.store_sums(sums.parts_ptr, pid, energy, keys + tl.zeros((BLOCK_H,), tl.float32), DIMS)
    elif MEMBERS and not OUTPUT:
        tile.store_sums(sums.parts_ptr, pid, moment, mass, DIMS)
    elif MEMBERS and state.lengths_ptr is not None:
        # Every thread reads the state before any replaces it.
        tl.debug_barrier()
        tile.add_channels(state.energy_ptr + by_channel, new_energy, DIMS)
        tile.add_channels(state.weighted_ptr + by_channel, new_moment / tile.SHIFT, DIMS)
        tile.add_heads(state.mass_ptr + by_head, new_mass, DIMS)
        tl.store(state.lengths_ptr + index, position + keys.to(tl.int32))
    if PACKED and OUTPUT and chunk == 0:
        out_at = tile.tokens_at(out_tokens, 0, 0)
        membership_at = TokenNumbers(membership_ptr, stride_ph)
        tile.clear_uncovered(
            out_at, membership_at, masking.cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS
        )


def causal_arguments(
    sizes: TokenSizes, w: Tensor, temp: Tensor, denom_bias: Tensor | None, out: Tensor, membership: Tensor
) -> dict[str, object]:
    """Return the arguments that the forward and decoding share; they have no state."""
    return {
        "w_tokens": sizes.strided(w),
        "out_tokens": sizes.strided(out),
        "temp_ptr": temp.contiguous(),
        "bias": Bias(denom_bias, *((0, 0) if denom_bias is None else denom_bias.stride()[:2])),
        "membership_ptr": membership,
        "state": CacheState(),
        "bias_tokens": 0 if denom_bias is None else denom_bias.shape[1],
        **sizes.arguments(),
    }


def forward_causal(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    call: TSSACall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out and membership of the causal form, and the sums that ``call`` asks for."""
    op_checks.forward_causal(w, temp, denom_bias, call)
    sizes = TokenSizes(w, call)
    out, membership = operator.empty_out(w), sizes.empty_rows()
    run_causal(_tssa_causal_fwd_kernel, sizes, causal_arguments(sizes, w, temp, denom_bias, out, membership))
    return out, membership, saved_sums(w, membership, call)
