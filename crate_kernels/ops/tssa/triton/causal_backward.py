"""The causal form in Triton, backward: two scans from the last token to the first, over running sums summed again.

A program has some heads of a chunk, one warp for 16 bytes of a token per thread, and goes through it in tiles. Heads
meet in the softmax alone, which has a launch of its own: no step waits for another warp. DMOMENT keeps the running sums
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
# pyright: reportCallIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import launch
from crate_kernels.ops.tssa import given
from crate_kernels.ops.tssa.call import Call
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.causal_bias import through_bias
from crate_kernels.ops.tssa.triton.launch import RUNTIME, Launch, causal_tile, head_groups, power_of_two
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
from crate_kernels.ops.tssa.triton.tile import Dims, Rows, Tokens

_STEPS = ("TOTALS", "DMOMENT", "DMEMBERS", "DENERGY", "DW")


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_bwd_kernel(
    dout_ptr,
    w_ptr,
    temp_ptr,
    bias_ptr,
    membership_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    seed_ptr,
    dw_ptr,
    dlogit_ptr,
    totals_ptr,
    energies_ptr,
    dmoments_ptr,
    denergies_ptr,
    marks_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_gd,
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
    ngroups,
    nchunks,
    chunk_size,
    seqlen,
    total,
    drop_last,
    inverse_keep,
    TOTALS: tl.constexpr,
    DMOMENT: tl.constexpr,
    DMEMBERS: tl.constexpr,
    DENERGY: tl.constexpr,
    DW: tl.constexpr,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    MARK: tl.constexpr,
):
    """Do one step on HEADS heads, of group ``pid % ngroups``, of a sequence's chunk ``pid // ngroups % nchunks``.

    ``totals_ptr`` has the sums of Pi w^2 and Pi, ``energies_ptr`` those of w^2, ``dmoments_ptr`` those of dM / s and
    V, ``denergies_ptr`` those of dc / temp and dtemp. A step stores the sums of its chunk; later steps read those up to
    the chunk or from it on. ``dlogit_ptr`` has dPi first, and the gradient of the logits after the softmax.
    """
    DIMS: tl.constexpr = Dims(HEADS, HEAD_DIM, BLOCK_H, BLOCK_D, PTX, w_ptr.dtype.element_ty == tl.float32)
    PACKED: tl.constexpr = cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    group = pid % ngroups
    index, chunk, origin, _count, first, last = tile.chunk_of(
        pid // ngroups, cu_seqlens_ptr, nchunks, chunk_size, seqlen, total
    )
    index64, head = index.to(tl.int64), group.to(tl.int64) * HEADS
    dw_ptr += head * stride_oh
    w_at = Tokens(w_ptr + index64 * stride_wb + origin * stride_ws + head * stride_wh, stride_ws, stride_wh, stride_wd)
    dout_at = Tokens(
        dout_ptr + index64 * stride_gb + origin * stride_gs + head * stride_gh, stride_gs, stride_gh, stride_gd
    )
    dw_at = Tokens(dw_ptr + index64 * stride_ob + origin * stride_os, stride_os, stride_oh, 1)
    rows_at = index64 * stride_pb + origin + head * stride_ph
    membership_at, dlogit_at = Rows(membership_ptr + rows_at, stride_ph), Rows(dlogit_ptr + rows_at, stride_ph)
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb

    moment, energy = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK_H,), tl.float32)
    dmoment, denergy, dtemp, dmass = moment, energy, energy, mass

    # A chunk's first tokens have the sums before the chunk in the place of a mark.
    first_mark = pid * (tl.cdiv(chunk_size, MARK) - 1) - 1

    if TOTALS:
        moment, mass, energy = add_tokens(
            (moment, mass, energy), w_at, membership_at, mask_ptr, stride_ms, first, last, BLOCK_N, DIMS, STAGES
        )
        tile.store_sums(totals_ptr, pid, moment, mass, DIMS)
        tile.store_sums(energies_ptr, pid, energy, dmass, DIMS)

    if DMOMENT:
        before = all_before_chunk(totals_ptr, energies_ptr, pid, chunk, ngroups, DIMS)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            moment, mass, energy = tile.first_of(n == first, before, (moment, mass, energy))
            if n > first and (n - first) % MARK == 0:
                store_mark(marks_ptr, first_mark + (n - first) // MARK, (moment, mass, energy), DIMS)
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)
            g = tile.load_apart(dout_at, n, last, BLOCK_N, DIMS)
            if seed_ptr is not None:
                g = tile.dropped(g, seed_ptr, drop_last, inverse_keep, index * ngroups + group, rows, DIMS)
            members = tile.load_rows(membership_at, rows, last, DIMS)
            keep = tile.kept(mask_ptr, rows, last, stride_ms)
            weights = tile.counted(members, keep, mask_ptr)
            _gate, _product, slope, dmasses, moment, mass = through_moment(w, g, members, weights, moment, mass, DIMS)
            energy += tl.sum(tile.counted(w * w * tile.SHIFT, keep, mask_ptr), 0)
            dmoment += tl.sum(slope, 0)
            dmass += tl.sum(dmasses, 0)
        tile.store_sums(dmoments_ptr, pid, dmoment, dmass, DIMS)

    if DENERGY:
        before_energy, _ = before_chunk(energies_ptr, pid, chunk, ngroups, DIMS)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)
            dlogit = tile.load_rows(dlogit_at, rows, last, DIMS)
            squares = w * w
            counted = tile.counted(squares * tile.SHIFT, tile.kept(mask_ptr, rows, last, stride_ms), mask_ptr)
            running = earlier_sums(tl.where(n == first, before_energy, energy), counted) + counted
            energy = tile.pick(running, BLOCK_N - 1)
            floored = tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT)
            inverse = quotients.reciprocal(floored, DIMS)
            similarity = (dlogit * tile.SHIFT)[:, :, None] * (squares * inverse)
            if bias_ptr is None:
                dtemp += tl.sum(similarity, 0)
            else:
                # A bias may take back nearly all of a ratio: products of either that are rounded would not cancel.
                heads = tile.heads_of(DIMS)
                places = rows.to(tl.int64)[:, None] * stride_bs + (head + heads)[None, :] * stride_bh
                there = (rows < last)[:, None] & (heads < HEADS)[None, :]
                bias = tl.load(bias_ptr + places, mask=there, other=0.0).to(tl.float32)
                ratio = quotients.quotient_of(squares, floored, DIMS) * tile.SHIFT
                dtemp += tl.sum(dlogit[:, :, None] * (ratio + bias[:, :, None]), 0)
            denergy += tl.sum(similarity * tl.where(running > tile.CAUSAL_FLOOR * tile.SHIFT, inverse, 0.0), 0)
        if bias_ptr is not None:
            dtemp = tl.where((tile.channels_of(DIMS) < HEAD_DIM)[None, :], dtemp, 0.0)  # padding has a bias too
        tile.store_sums(denergies_ptr, pid, denergy, tl.sum(dtemp, 1), DIMS)

    if DMEMBERS or DW:
        after_moment, after_mass = after_chunk(dmoments_ptr, pid, chunk, nchunks, ngroups, DIMS)
        after_energy = denergy
        if DW:
            after_energy, _ = after_chunk(denergies_ptr, pid, chunk, nchunks, ngroups, DIMS)
        nmarks = tl.cdiv(tl.maximum(last - first, 0), MARK)
        for number in tl.range(0, nmarks):
            dmoment, dmass, denergy = tile.first_of(
                number == 0, (after_moment, after_mass, after_energy), (dmoment, dmass, denergy)
            )
            mark = nmarks - 1 - number
            begin = first + mark * MARK
            end = tl.minimum(begin + MARK, last)
            if mark > 0:
                marked = load_mark(marks_ptr, first_mark + mark, DIMS)
            else:
                # Loaded here again: registers are what limits this loop.
                marked = all_before_chunk(totals_ptr, energies_ptr, pid, chunk, ngroups, DIMS)
            twice = 2.0 * tile.load_heads(temp_ptr + head, DIMS)  # here, so that it takes no registers from the start
            ntiles = tl.cdiv(end - begin, BLOCK_N)
            for back in tl.range(0, ntiles):
                n = begin + (ntiles - 1 - back) * BLOCK_N
                rows = n + tl.arange(0, BLOCK_N)
                w = tile.load_apart(w_at, n, last, BLOCK_N, DIMS)
                g = tile.load_apart(dout_at, n, last, BLOCK_N, DIMS)
                if seed_ptr is not None:
                    g = tile.dropped(g, seed_ptr, drop_last, inverse_keep, index * ngroups + group, rows, DIMS)
                members = tile.load_rows(membership_at, rows, last, DIMS)
                keep = tile.kept(mask_ptr, rows, last, stride_ms)
                weights = tile.counted(members, keep, mask_ptr)
                moment, mass, energy = add_tokens(
                    marked, w_at, membership_at, mask_ptr, stride_ms, begin, n, BLOCK_N, DIMS, 1
                )
                gate, product, slope, dmasses, _, _ = through_moment(w, g, members, weights, moment, mass, DIMS)
                dmoments = later_sums(dmoment, slope) + slope
                dmoment = tile.pick(dmoments, 0)
                squares = w * w
                if DMEMBERS:
                    masses = later_sums(dmass, dmasses) + dmasses
                    dmass = tile.pick(masses, 0)
                    dmembers = tl.sum(tile.counted(dmoments * squares, keep, mask_ptr) - product, 2)
                    dmembers += tile.counted(masses, keep, mask_ptr)
                    tile.store_rows(dlogit_at, dmembers, rows, rows < last, DIMS)
                else:
                    # One number per element goes from here to the other half: registers are what limits this loop.
                    dw = w * ((2.0 * weights)[:, :, None] * dmoments) - gate * members[:, :, None]
                    per_logit = tile.load_rows(dlogit_at, rows, last, DIMS) * tile.SHIFT
                    counted = tile.counted(squares * tile.SHIFT, keep, mask_ptr)
                    earlier = earlier_sums(energy, counted)
                    running = earlier + counted
                    inverse = quotients.reciprocal(tile.floored(running, tile.CAUSAL_FLOOR * tile.SHIFT), DIMS)
                    above = running > tile.CAUSAL_FLOOR * tile.SHIFT
                    per_energy = per_logit[:, :, None] * inverse
                    # A similarity is at most dlogit: times 1 / c, in its scale, it needs no shift in between.
                    denergies = tl.where(above, per_energy * squares * inverse, 0.0)
                    later = later_sums(denergy, denergies)
                    denergy = tile.pick(later + denergies, 0)
                    # The token's own part, 1 / c - w^2 / c^2, is one term, so that a first token's cancels exactly.
                    own = per_energy * tl.where(above, earlier * inverse, 1.0)
                    through_energy = own - tile.counted(later * tile.SHIFT, keep, mask_ptr)
                    dw += (twice[None, :, None] * w) * through_energy
                    tile.store_apart(dw_at, dw, n, last, BLOCK_N, DIMS)
    if PACKED and DW and chunk == 0:
        dw_at = Tokens(dw_ptr, stride_os, stride_oh, 1)
        tile.clear_uncovered(dw_at, None, cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS)


@triton.jit(do_not_specialize=("stride_pb", "seqlen"))
def _tssa_causal_softmax_bwd_kernel(
    dlogit_ptr,
    membership_ptr,
    dmembership_ptr,
    stride_pb,
    stride_ph,
    seqlen,
    NHEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Turn dPi, and the gradient of the membership if there is one, into the gradient of the logits, in place."""
    DIMS: tl.constexpr = Dims(NHEADS, 1, BLOCK_H, 1, False)
    nblocks = tl.cdiv(seqlen, BLOCK_N)
    rows = (tl.program_id(0) % nblocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_at = (tl.program_id(0) // nblocks).to(tl.int64) * stride_pb
    dlogit_at = Rows(dlogit_ptr + rows_at, stride_ph)
    dmembers = tile.load_rows(dlogit_at, rows, seqlen, DIMS)
    if dmembership_ptr is not None:
        dmembers += tile.load_rows(Rows(dmembership_ptr + rows_at, stride_ph), rows, seqlen, DIMS)
    members = tile.load_rows(Rows(membership_ptr + rows_at, stride_ph), rows, seqlen, DIMS)
    tile.store_rows(dlogit_at, tile.softmax_backward(members, dmembers), rows, rows < seqlen, DIMS)


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    given.backward_causal(dout, dmembership, w, temp, denom_bias, membership, call)
    sizes = Launch(w, call)
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
    # Of float32 tokens DENERGY takes the bias into dtemp; others have no digits that would tell.
    wide = w.dtype == torch.float32
    bias_strides = denom_bias.stride() if wide and denom_bias is not None else (0, 0)
    arguments = {
        "dout_ptr": dout,
        "w_ptr": w,
        "temp_ptr": temp_,
        "bias_ptr": denom_bias if wide else None,
        "stride_bh": bias_strides[0],
        "stride_bs": bias_strides[1],
        "membership_ptr": membership,
        "dw_ptr": dw,
        "dlogit_ptr": dlogit,
        "totals_ptr": totals[0],
        "energies_ptr": totals[1],
        "dmoments_ptr": dmoments,
        "denergies_ptr": denergies,
        "marks_ptr": sizes.empty_sums(nchunks * marks, 2),
        **sizes.arguments(),
        **sizes.strides("g", dout),
        **sizes.strides("w", w),
        **sizes.strides("o", dw, contiguous=True),
        **cut,
    }
    programs = sizes.nsequences * nchunks * cut["ngroups"]
    with launch.guard(sizes.device):
        for step, sums in zip(_STEPS, (totals, dmoments, None, denergies, None), strict=True):
            if step == "DW":
                arguments["BLOCK_N"] = max(cut["BLOCK_N"] // 2, 1)  # with as many as before it, registers spill
            launch.run(_tssa_causal_bwd_kernel, programs, **arguments, **{s: s == step for s in _STEPS})
            if sums is not None:
                scan_chunks(sums, reverse=sums is not totals)
            if step == "DMEMBERS":
                _through_softmax(sizes, dlogit, membership, dmembership)
        # Behind the sums of each group's channels there is one of dtemp for each of its heads.
        parts = denergies[:, 0].unflatten(1, (cut["ngroups"], cut["HEADS"] * (sizes.head_dim + 1)))
        dtemp = parts[:, :, cut["HEADS"] * sizes.head_dim :].sum(0).flatten()
        if denom_bias is None:
            return dw, dtemp.to(temp.dtype), temp.new_empty(0)
        ddenom_bias, dtemp_of_bias = through_bias(sizes, dlogit, temp_, denom_bias)
        if not wide:
            dtemp += dtemp_of_bias
    return dw, dtemp.to(temp.dtype), ddenom_bias


def _through_softmax(sizes: Launch, dlogit: Tensor, membership: Tensor, dmembership: Tensor | None) -> None:
    """Turn dPi into the gradient of the logits; packed sequences lie behind one another and go as one."""
    shared, rows = sizes.arguments(), 128
    seqlen = dlogit.shape[-1]
    launch.run(
        _tssa_causal_softmax_bwd_kernel,
        (1 if sizes.call.packed else sizes.nsequences) * -(-seqlen // rows),
        dlogit_ptr=dlogit,
        membership_ptr=membership,
        dmembership_ptr=None if dmembership is None else dmembership.contiguous(),
        stride_pb=shared["stride_pb"],
        stride_ph=shared["stride_ph"],
        seqlen=seqlen,
        NHEADS=sizes.nheads,
        BLOCK_N=rows,
        BLOCK_H=power_of_two(sizes.nheads),
        num_warps=4,
    )
