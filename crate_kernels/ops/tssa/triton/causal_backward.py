"""The causal form in Triton, backward: two scans from the last token to the first, over running sums summed again.

A program has some heads of a chunk, one warp for 16 bytes of a token per thread, and goes through it in tiles. Heads
meet in the softmax alone, which is a separate launch: no step waits for another warp. DMOMENT keeps the running sums
at marks, every MARK tokens; where a step scans backwards, it adds them up again from the mark before each tile. Each
step reads the sums that ``scan_chunks`` made of those before. Passes and rows as in ``causal.py``, (read, written):

======== ====== ===== ===================================================
step     passes rows  leaves
======== ====== ===== ===================================================
TOTALS   1, 0   1, 0  sums of Pi w^2, of Pi and of w^2
DMOMENT  2, 0   1, 0  sums of dM / s, and V
DMEMBERS 2, 0   1, 1  the gradient of the membership
softmax  0, 0   2, 1  the gradient of the logits
DENERGY  1, 0   1, 0  sums of dc / temp; dtemp
DW       2, 1   2, 0  dw
======== ====== ===== ===================================================

In all 8 reads and 1 write, in 9 launches (6 where a sequence is one chunk), and 1 launch for ddenom_bias, which reads
one row more; so do the gradient of the membership and, of float32 tokens, the bias in DENERGY. With the softmax in the
same programs it would be a read less, but warps would wait for each other in every tile, and the lanes of twelve heads
would be those of sixteen: more clocks by the model. The chunks' sums are four sets of 1 / CHUNK of a pass in fp32, each
written once and read once to three times, and read and written once by its scan. The marks are two sets of 1 / MARK of
a pass in fp32, but for each chunk's first, written once and read twice. There are no atomics: every sum has one order.
Sums of squares, and what is divided by c, are in the scale in which their reciprocals are taken (``tile.SHIFT``).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import launch
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.causal_bias import through_bias
from crate_kernels.ops.tssa.triton.launch import RUNTIME, TokenSizes, causal_tile, head_groups, power_of_two
from crate_kernels.ops.tssa.triton.members import softmax_backward
from crate_kernels.ops.tssa.triton.scan import (
    add_tokens,
    after_chunk,
    all_before_chunk,
    before_chunk,
    earlier_sums,
    later_sums,
    load_mark,
    scan_chunks,
    store_mark,
    through_moment,
)
from crate_kernels.ops.tssa.triton.tables import CAUSAL_BACKWARD
from crate_kernels.ops.tssa.triton.tile import Bias, TokenDims, TokenNumbers


class BackwardSums(NamedTuple):
    """Sums over the tokens of each chunk, and at the marks within chunks."""

    totals_ptr: Any  # of Pi w^2, and of Pi
    energies_ptr: Any  # of w^2
    dmoments_ptr: Any  # of dM / s, and of V
    denergies_ptr: Any  # of dc / temp, and dtemp
    marks_ptr: Any


_STEPS = ("TOTALS", "DMOMENT", "DMEMBERS", "DENERGY", "DW")


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_bwd_kernel(
    dout_tokens, w_tokens, dw_tokens, temp_ptr, bias, membership_ptr, dlogit_ptr, sums, masking, stride_mb,
    stride_pb, stride_ph, nsequences, ngroups, nchunks, chunk_size, seqlen, total, drop_last,
    TOTALS: tl.constexpr, DMOMENT: tl.constexpr, DMEMBERS: tl.constexpr, DENERGY: tl.constexpr,
    DW: tl.constexpr, DIMS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """Do one step on the heads of DIMS, of group ``pid % ngroups``, of a sequence's chunk ``pid // ngroups % nchunks``.

    A step stores the sums of its chunk; later steps read those up to the chunk or from it on. ``dlogit_ptr`` has dPi
    first, and the gradient of the logits after the softmax.
    """
    BLOCK_H: tl.constexpr = DIMS.BLOCK_H
    BLOCK_D: tl.constexpr = DIMS.BLOCK_D
    PACKED: tl.constexpr = masking.cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    group = pid % ngroups
    index, chunk, origin, _count, first, last = tile.chunk_of(
        pid // ngroups, masking.cu_seqlens_ptr, nchunks, chunk_size, seqlen, total
    )
    index64, head = index.to(tl.int64), group.to(tl.int64) * DIMS.NHEADS
    w_at = tile.of_heads(tile.tokens_at(w_tokens, index64, origin), head)
    dout_at = tile.of_heads(tile.tokens_at(dout_tokens, index64, origin), head)
    dw_at = tile.of_heads(tile.tokens_at(dw_tokens, index64, origin), head)
    rows_at = index64 * stride_pb + origin + head * stride_ph
    membership_at, dlogit_at = (
        TokenNumbers(membership_ptr + rows_at, stride_ph),
        TokenNumbers(dlogit_ptr + rows_at, stride_ph),
    )
    mask_ptr = masking.mask_ptr
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb

    moment, energy = (
        tl.zeros((BLOCK_H, BLOCK_D), tl.float32),
        tl.zeros((BLOCK_H, BLOCK_D), tl.float32),
    )
    mass = tl.zeros((BLOCK_H,), tl.float32)
    dmoment, denergy, dtemp, dmass = moment, energy, energy, mass

    # A chunk's first tokens have the sums before the chunk in the place of a mark.
    first_mark = pid * (tl.cdiv(chunk_size, MARK) - 1) - 1

    if TOTALS:
        moment, mass, energy = add_tokens(
            (moment, mass, energy), w_at, membership_at, mask_ptr, masking.stride_ms, first, last, BLOCK_N, DIMS, STAGES
        )
        tile.store_sums(sums.totals_ptr, pid, moment, mass, DIMS)
        tile.store_sums(sums.energies_ptr, pid, energy, dmass, DIMS)

    if DMOMENT:
        before = all_before_chunk(sums.totals_ptr, sums.energies_ptr, pid, chunk, ngroups, DIMS)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            moment, mass, energy = tile.first_of(n == first, before, (moment, mass, energy))
            if n > first and (n - first) % MARK == 0:
                store_mark(sums.marks_ptr, first_mark + (n - first) // MARK, (moment, mass, energy), DIMS)
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            g = tile.load_apart(dout_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            if masking.seed_ptr is not None:
                g = tile.dropped(
                    g, masking.seed_ptr, drop_last, masking.inverse_keep, index * ngroups + group, rows, DIMS
                )
            members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            keep = tile.kept(mask_ptr, rows, last, masking.stride_ms)  # (BLOCK_N,)
            weights = tile.counted(members, keep, mask_ptr)  # (BLOCK_N, BLOCK_H)
            _gate, _product, slope, dmasses, moment, mass = through_moment(w, g, members, weights, moment, mass, DIMS)
            energy += tl.sum(tile.counted(w * w * tile.SHIFT, keep, mask_ptr), 0)
            dmoment += tl.sum(slope, 0)
            dmass += tl.sum(dmasses, 0)
        tile.store_sums(sums.dmoments_ptr, pid, dmoment, dmass, DIMS)

    if DENERGY:
        before_energy, _ = before_chunk(sums.energies_ptr, pid, chunk, ngroups, DIMS)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            dlogit = tile.load_rows(dlogit_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
            counted = tile.counted(squares * tile.SHIFT, tile.kept(mask_ptr, rows, last, masking.stride_ms), mask_ptr)
            running = earlier_sums(tl.where(n == first, before_energy, energy), counted) + counted
            energy = tile.pick(running, BLOCK_N - 1)  # (BLOCK_H, BLOCK_D)
            floored = tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT)
            inverse = quotients.reciprocal(floored, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            similarity = (dlogit * tile.SHIFT)[:, :, None] * (squares * inverse)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            if bias.ptr is None:
                dtemp += tl.sum(similarity, 0)
            else:
                # A bias may take back nearly all of a ratio: products of either that are rounded would not cancel.
                heads = tile.heads_of(DIMS)
                places = rows.to(tl.int64)[:, None] * bias.stride_s + (head + heads)[None, :] * bias.stride_h
                there = (rows < last)[:, None] & (heads < DIMS.NHEADS)[None, :]
                terms = tl.load(bias.ptr + places, mask=there, other=0.0).to(tl.float32)
                ratio = quotients.quotient_of(squares, floored, DIMS) * tile.SHIFT  # (BLOCK_N, BLOCK_H, BLOCK_D)
                dtemp += tl.sum(dlogit[:, :, None] * (ratio + terms[:, :, None]), 0)
            denergy += tl.sum(similarity * tl.where(running > tile.CAUSAL_FLOOR * tile.SHIFT, inverse, 0.0), 0)
        if bias.ptr is not None:
            dtemp = tl.where((tile.channels_of(DIMS) < DIMS.HEAD_DIM)[None, :], dtemp, 0.0)  # padding has a bias too
        tile.store_sums(sums.denergies_ptr, pid, denergy, tl.sum(dtemp, 1), DIMS)

    if DMEMBERS or DW:
        after_moment, after_mass = after_chunk(sums.dmoments_ptr, pid, chunk, nchunks, ngroups, DIMS)
        after_energy = denergy
        if DW:
            after_energy, _ = after_chunk(sums.denergies_ptr, pid, chunk, nchunks, ngroups, DIMS)
        nmarks = tl.cdiv(tl.maximum(last - first, 0), MARK)
        for number in tl.range(0, nmarks):
            dmoment, dmass, denergy = tile.first_of(
                number == 0, (after_moment, after_mass, after_energy), (dmoment, dmass, denergy)
            )
            mark = nmarks - 1 - number
            begin = first + mark * MARK
            end = tl.minimum(begin + MARK, last)
            if mark > 0:
                marked = load_mark(sums.marks_ptr, first_mark + mark, DIMS)
            else:
                # Loaded here again: registers are what limits this loop.
                marked = all_before_chunk(sums.totals_ptr, sums.energies_ptr, pid, chunk, ngroups, DIMS)
            twice = 2.0 * tile.load_heads(temp_ptr + head, DIMS)  # here, so that it takes no registers from the start
            ntiles = tl.cdiv(end - begin, BLOCK_N)
            for back in tl.range(0, ntiles):
                n = begin + (ntiles - 1 - back) * BLOCK_N
                rows = n + tl.arange(0, BLOCK_N)
                w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                g = tile.load_apart(dout_at, n, last, BLOCK_N, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                if masking.seed_ptr is not None:
                    g = tile.dropped(
                        g, masking.seed_ptr, drop_last, masking.inverse_keep, index * ngroups + group, rows, DIMS
                    )
                members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
                keep = tile.kept(mask_ptr, rows, last, masking.stride_ms)  # (BLOCK_N,)
                weights = tile.counted(members, keep, mask_ptr)  # (BLOCK_N, BLOCK_H)
                moment, mass, energy = add_tokens(
                    marked, w_at, membership_at, mask_ptr, masking.stride_ms, begin, n, BLOCK_N, DIMS, 1
                )
                gate, product, slope, dmasses, _, _ = through_moment(w, g, members, weights, moment, mass, DIMS)
                dmoments = later_sums(dmoment, slope) + slope  # (BLOCK_N, BLOCK_H, BLOCK_D)
                dmoment = tile.pick(dmoments, 0)  # (BLOCK_H, BLOCK_D)
                squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
                if DMEMBERS:
                    masses = later_sums(dmass, dmasses) + dmasses  # (BLOCK_N, BLOCK_H)
                    dmass = tile.pick(masses, 0)  # (BLOCK_H,)
                    dmembers = tl.sum(tile.counted(dmoments * squares, keep, mask_ptr) - product, 2)
                    dmembers += tile.counted(masses, keep, mask_ptr)
                    tile.store_rows(dlogit_at, dmembers, rows, rows < last, DIMS)
                else:
                    # One number per element goes from here to the other half: registers are what limits this loop.
                    dw = w * ((2.0 * weights)[:, :, None] * dmoments) - gate * members[:, :, None]
                    per_logit = tile.load_rows(dlogit_at, rows, last, DIMS) * tile.SHIFT  # (BLOCK_N, BLOCK_H)
                    counted = tile.counted(squares * tile.SHIFT, keep, mask_ptr)
                    earlier = earlier_sums(energy, counted)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    running = earlier + counted  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    inverse = quotients.reciprocal(tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT), DIMS)
                    above = running > tile.CAUSAL_FLOOR * tile.SHIFT
                    per_energy = per_logit[:, :, None] * inverse  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    # A similarity is at most dlogit: times 1 / c, in its scale, it needs no shift in between.
                    denergies = tl.where(above, per_energy * squares * inverse, 0.0)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    later = later_sums(denergy, denergies)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    denergy = tile.pick(later + denergies, 0)  # (BLOCK_H, BLOCK_D)
                    # The token's own part, 1 / c - w^2 / c^2, is one term, so that a first token's cancels exactly.
                    own = per_energy * tl.where(above, earlier * inverse, 1.0)  # (BLOCK_N, BLOCK_H, BLOCK_D)
                    through_energy = own - tile.counted(later * tile.SHIFT, keep, mask_ptr)
                    dw += (twice[None, :, None] * w) * through_energy
                    tile.store_apart(dw_at, dw, n, last, BLOCK_N, DIMS)
    if PACKED and DW and chunk == 0:
        dw_at = tile.of_heads(tile.tokens_at(dw_tokens, 0, 0), head)
        tile.clear_uncovered(dw_at, None, masking.cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS)


@triton.jit(do_not_specialize=("seqlen",))
def _tssa_causal_softmax_bwd_kernel(
    dlogit_ptr,
    membership_ptr,
    dmembership_ptr,
    seqlen,
    NHEADS: tl.constexpr,
    BY_FOUR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Turn dPi, and the gradient of the membership if there is one, into the gradient of the logits, in place.

    BY_FOUR: ``seqlen`` is a multiple of 4, so that a thread has four neighbouring tokens.
    """
    DIMS: tl.constexpr = TokenDims(NHEADS, 1, BLOCK_H, 1, False)
    if BY_FOUR:
        seqlen = seqlen // 4 * 4
    nblocks = tl.cdiv(seqlen, BLOCK_N)
    rows = (tl.program_id(0) % nblocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_at = (tl.program_id(0) // nblocks).to(tl.int64) * NHEADS * seqlen
    dlogit_at = TokenNumbers(dlogit_ptr + rows_at, seqlen)
    dmembers = tile.load_rows(dlogit_at, rows, seqlen, DIMS)  # (BLOCK_N, BLOCK_H)
    if dmembership_ptr is not None:
        dmembers += tile.load_rows(TokenNumbers(dmembership_ptr + rows_at, seqlen), rows, seqlen, DIMS)
    members = tile.load_rows(TokenNumbers(membership_ptr + rows_at, seqlen), rows, seqlen, DIMS)  # (BLOCK_N, BLOCK_H)
    tile.store_rows(dlogit_at, softmax_backward(members, dmembers), rows, rows < seqlen, DIMS)


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    sums: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias); sums are added up again, whatever was saved."""
    op_checks.backward_causal(dout, dmembership, w, temp, denom_bias, membership, call)
    op_checks.saved_sums(sums, w, call)
    sizes = TokenSizes(w, call)
    cut, nchunks = causal_tile(CAUSAL_BACKWARD, sizes)
    cut |= head_groups(CAUSAL_BACKWARD, sizes)
    cut["MARK"] = max(cut["BLOCK_N"], 8)
    if call.seed is not None:
        cut["BLOCK_N"] = max(cut["BLOCK_N"] // 2, 1)  # the factors of dropout take registers
    marks = max(-(-cut["chunk_size"] // cut["MARK"]), 1) - 1
    dw, dlogit, temp_, membership = (
        operator.empty_out(w),
        sizes.empty_rows(),
        temp.contiguous(),
        membership.contiguous(),
    )
    totals, dmoments, denergies = sizes.empty_sums(nchunks, 2), sizes.empty_sums(nchunks), sizes.empty_sums(nchunks)
    # Of float32 tokens DENERGY takes the bias into dtemp; others have too few digits for a difference.
    wide = w.dtype == torch.float32
    bias_strides = denom_bias.stride()[:2] if wide and denom_bias is not None else (0, 0)
    arguments = {
        "dout_tokens": sizes.strided(dout),
        "w_tokens": sizes.strided(w),
        "dw_tokens": sizes.strided(dw),
        "temp_ptr": temp_,
        "bias": Bias(denom_bias if wide else None, *bias_strides),
        "membership_ptr": membership,
        "dlogit_ptr": dlogit,
        "sums": BackwardSums(totals[0], totals[1], dmoments, denergies, marks_ptr=sizes.empty_sums(nchunks * marks, 2)),
        **sizes.arguments(),
        **cut,
    }
    programs = sizes.nsequences * nchunks * cut["ngroups"]
    with launch.guard(sizes.device):
        for step, chunks in zip(_STEPS, (totals, dmoments, None, denergies, None), strict=True):
            if step == "DW":
                arguments["BLOCK_N"] = max(cut["BLOCK_N"] // 2, 1)  # with as many as before it, registers spill
            launch.run(_tssa_causal_bwd_kernel, programs, **arguments, **{s: s == step for s in _STEPS})
            if chunks is not None:
                scan_chunks(chunks, reverse=chunks is not totals)
            if step == "DMEMBERS":
                _through_softmax(sizes, dlogit, membership, dmembership)
        # Behind the sums of each group's channels there is one of dtemp for each of its heads.
        heads = cut["DIMS"].NHEADS
        parts = denergies[:, 0].unflatten(1, (cut["ngroups"], heads * (sizes.head_dim + 1)))
        dtemp = parts[:, :, heads * sizes.head_dim :].sum(0).flatten()
        if denom_bias is None:
            return dw, dtemp.to(temp.dtype), temp.new_empty(0)
        ddenom_bias, more = through_bias(sizes, dlogit, temp_, denom_bias, through_temp=not wide)
        if more is not None:
            dtemp += more
    return dw, dtemp.to(temp.dtype), ddenom_bias


def _through_softmax(sizes: TokenSizes, dlogit: Tensor, membership: Tensor, dmembership: Tensor | None) -> None:
    """Turn dPi into the gradient of the logits; packed sequences lie behind one another and go as one."""
    rows, heads, seqlen = 128, power_of_two(sizes.nheads), dlogit.shape[-1]
    by_four = seqlen % 4 == 0
    launch.run(
        _tssa_causal_softmax_bwd_kernel,
        (1 if sizes.call.packed else sizes.nsequences) * -(-seqlen // rows),
        dlogit_ptr=dlogit,
        membership_ptr=membership,
        dmembership_ptr=None if dmembership is None else dmembership.contiguous(),
        seqlen=seqlen,
        NHEADS=sizes.nheads,
        BY_FOUR=by_four,
        BLOCK_N=rows,
        BLOCK_H=heads,
        num_warps=min(max(heads // 16, 1), 8) if by_four else 4,
    )
