"""The causal form in Triton, backward: two scans from the last token to the first, over running sums summed again.

A program has one chunk, with every head of its tokens, and goes through it in tiles. DMOMENT keeps the running sums at
marks, every MARK tokens; where a step scans backwards, it adds them up again from the mark before each tile. Each step
reads the sums that ``scan_chunks`` made of the one before. Passes and rows as in ``causal.py``, (read, written):

======= ====== ===== ===================================================
step    passes rows  leaves
======= ====== ===== ===================================================
TOTALS  1, 0   1, 0  sums of Pi w^2, of Pi and of w^2
DMOMENT 2, 0   1, 0  sums of dM / s, and V
DLOGIT  2, 0   1, 1  the gradient of the logits; sums of dc / temp; dtemp
DW      2, 1   2, 0  dw
======= ====== ===== ===================================================

In all 7 reads and 1 write, in 7 launches (4 where a sequence is one chunk), and 1 launch for ddenom_bias, which reads
one row more; so does the gradient of the membership. The chunks' sums are four sets of 1 / CHUNK of a pass in fp32,
each written once and read once to three times, and read and written once by its scan. The marks are two sets of
1 / MARK of a pass in fp32, but for each chunk's first, written once and read twice. There are no atomics: every sum has
one order.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import launch
from crate_kernels.ops.tssa.call import Call
from crate_kernels.ops.tssa.triton import tile
from crate_kernels.ops.tssa.triton.causal_bias import through_bias
from crate_kernels.ops.tssa.triton.launch import RUNTIME, Launch, causal_tile
from crate_kernels.ops.tssa.triton.scan import (
    add_tokens,
    after_chunk,
    all_before_chunk,
    load_mark,
    scan_chunks,
    store_mark,
    suffix_sums,
    through_moment,
)
from crate_kernels.ops.tssa.triton.tables import CAUSAL_BACKWARD
from crate_kernels.ops.tssa.triton.tile import Dims, Rows, Tokens

_STEPS = ("TOTALS", "DMOMENT", "DLOGIT", "DW")


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_bwd_kernel(
    dout_ptr,
    dmembership_ptr,
    w_ptr,
    temp_ptr,
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
    drop_last,
    inverse_keep,
    TOTALS: tl.constexpr,
    DMOMENT: tl.constexpr,
    DLOGIT: tl.constexpr,
    DW: tl.constexpr,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    MARK: tl.constexpr,
):
    """Do one step on chunk ``pid % nchunks`` of a sequence.

    ``totals_ptr`` has the sums of Pi w^2 and Pi, ``energies_ptr`` those of w^2, ``dmoments_ptr`` those of dM / s and
    V, ``denergies_ptr`` those of dc / temp. A step stores the sums of its chunk; later steps read those up to the chunk
    or from it on.
    """
    DIMS: tl.constexpr = Dims(NHEADS, HEAD_DIM, BLOCK_H, BLOCK_D, PTX)
    PACKED: tl.constexpr = cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk, origin, _count, first, last = tile.chunk_of(cu_seqlens_ptr, nchunks, chunk_size, seqlen, total)
    index64 = index.to(tl.int64)
    w_at = Tokens(w_ptr + index64 * stride_wb + origin * stride_ws, stride_ws, stride_wh, stride_wd)
    dout_at = Tokens(dout_ptr + index64 * stride_gb + origin * stride_gs, stride_gs, stride_gh, stride_gd)
    dw_at = Tokens(dw_ptr + index64 * stride_ob + origin * stride_os, stride_os, stride_oh, 1)
    rows_at = index64 * stride_pb + origin
    membership_at, dlogit_at = Rows(membership_ptr + rows_at, stride_ph), Rows(dlogit_ptr + rows_at, stride_ph)
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb

    moment, energy = tl.zeros((BLOCK_H, BLOCK_D), tl.float32), tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK_H,), tl.float32)
    dmoment, denergy, dmass, dtemp = moment, energy, mass, mass

    # A chunk's first tokens have the sums before the chunk in the place of a mark.
    first_mark = pid * (tl.cdiv(chunk_size, MARK) - 1) - 1

    if TOTALS:
        moment, mass, energy = add_tokens(
            (moment, mass, energy), w_at, membership_at, mask_ptr, stride_ms, first, last, BLOCK_N, DIMS, STAGES
        )
        tile.store_sums(totals_ptr, pid, moment, mass, DIMS)
        tile.store_sums(energies_ptr, pid, energy, dmass, DIMS)

    if DMOMENT:
        moment, mass, energy = all_before_chunk(totals_ptr, energies_ptr, pid, chunk, DIMS)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            if n > first and (n - first) % MARK == 0:
                store_mark(marks_ptr, first_mark + (n - first) // MARK, (moment, mass, energy), DIMS)
            rows = n + tl.arange(0, BLOCK_N)
            w, g = tile.load_tokens(w_at, rows, last, DIMS), tile.load_tokens(dout_at, rows, last, DIMS)
            if seed_ptr is not None:
                g = tile.dropped(g, seed_ptr, drop_last, inverse_keep, index, rows, DIMS)
            members = tile.load_rows(membership_at, rows, last, DIMS)
            keep = tile.kept(mask_ptr, rows, last, stride_ms)
            weights = tile.counted(members, keep, mask_ptr)
            _gate, slope, dmasses = through_moment(w, g, members, weights, moment, mass, DIMS)
            moment += tl.sum(w * w * weights[:, :, None], 0)
            mass += tl.sum(weights, 0)
            energy += tl.sum(tile.counted(w * w, keep, mask_ptr), 0)
            dmoment += tl.sum(slope, 0)
            dmass += tl.sum(dmasses, 0)
        tile.store_sums(dmoments_ptr, pid, dmoment, dmass, DIMS)

    if DLOGIT or DW:
        temp = tile.load_heads(temp_ptr, DIMS)
        dmoment, dmass = after_chunk(dmoments_ptr, pid, chunk, nchunks, DIMS)
        if DW:
            denergy, _ = after_chunk(denergies_ptr, pid, chunk, nchunks, DIMS)
        nmarks = tl.cdiv(tl.maximum(last - first, 0), MARK)
        for number in tl.range(0, nmarks):
            mark = nmarks - 1 - number
            begin = first + mark * MARK
            end = tl.minimum(begin + MARK, last)
            if mark > 0:
                marked = load_mark(marks_ptr, first_mark + mark, DIMS)
            else:
                # Loaded here again: registers are what limits this loop.
                marked = all_before_chunk(totals_ptr, energies_ptr, pid, chunk, DIMS)
            ntiles = tl.cdiv(end - begin, BLOCK_N)
            for back in tl.range(0, ntiles):
                n = begin + (ntiles - 1 - back) * BLOCK_N
                rows = n + tl.arange(0, BLOCK_N)
                w, g = tile.load_tokens(w_at, rows, last, DIMS), tile.load_tokens(dout_at, rows, last, DIMS)
                if seed_ptr is not None:
                    g = tile.dropped(g, seed_ptr, drop_last, inverse_keep, index, rows, DIMS)
                members = tile.load_rows(membership_at, rows, last, DIMS)
                keep = tile.kept(mask_ptr, rows, last, stride_ms)
                weights = tile.counted(members, keep, mask_ptr)
                tile_moment, tile_mass, tile_energy = add_tokens(
                    marked, w_at, membership_at, mask_ptr, stride_ms, begin, n, BLOCK_N, DIMS, 1
                )
                gate, slope, dmasses = through_moment(w, g, members, weights, tile_moment, tile_mass, DIMS)
                dmoments = dmoment[None, :, :] + suffix_sums(slope)
                squares = w * w
                if DLOGIT:
                    later = tl.reshape(suffix_sums(dmasses[:, :, None]), (BLOCK_N, BLOCK_H))
                    shared = tl.sum(dmoments * squares, 2) + dmass[None, :] + later
                    dmembers = tile.counted(shared, keep, mask_ptr) - tl.sum(gate * w, 2)
                    if dmembership_ptr is not None:
                        dmembers += tile.load_rows(Rows(dmembership_ptr + rows_at, stride_ph), rows, last, DIMS)
                    dlogit = tile.softmax_backward(members, dmembers)
                    tile.store_rows(dlogit_at, dlogit, rows, rows < last, DIMS)
                else:
                    dlogit = tile.load_rows(dlogit_at, rows, last, DIMS)
                counted = tile.counted(squares, keep, mask_ptr)
                running = tile_energy[None, :, :] + tl.cumsum(counted, 0)
                inverse = tile.reciprocal(tile.floored(running * tile.SHIFT, tile.CAUSAL_FLOOR * tile.SHIFT), DIMS)
                above = running > tile.CAUSAL_FLOOR
                per_energy = (dlogit * tile.SHIFT)[:, :, None] * inverse
                similarity = per_energy * squares
                # 1 / c is at most 1e12 and similarity at most dlogit: their product needs no shift in between.
                denergies = tl.where(above, similarity * (inverse * tile.SHIFT), 0.0)
                if DLOGIT:
                    dtemp += tl.sum(tl.sum(similarity, 2), 0)
                else:
                    # The later sums leave out the token itself. Its own part, 1 / c - w^2 / c^2, is one term, so that a
                    # first token's cancels exactly.
                    later_energy = denergy[None, :, :] + (suffix_sums(denergies) - denergies)
                    own = per_energy * tl.where(above, (running - counted) * (inverse * tile.SHIFT), 1.0)
                    dw = temp[None, :, None] * (own - tile.counted(later_energy, keep, mask_ptr))
                    dw = 2.0 * w * (dw + dmoments * weights[:, :, None]) - gate * members[:, :, None]
                    tile.store_tokens(dw_at, dw, rows, rows < last, DIMS)
                denergy += tl.sum(denergies, 0)
                dmoment += tl.sum(slope, 0)
                dmass += tl.sum(dmasses, 0)
        if DLOGIT:
            tile.store_sums(denergies_ptr, pid, denergy, dtemp, DIMS)
    if PACKED and DW and chunk == 0:
        dw_at = Tokens(dw_ptr, stride_os, stride_oh, 1)
        tile.clear_uncovered(dw_at, None, cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS)


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
    sizes = Launch(w, call)
    cut, nchunks = causal_tile(CAUSAL_BACKWARD, sizes)
    cut["MARK"] = max(cut["BLOCK_N"], 8)
    marks = max(-(-cut["chunk_size"] // cut["MARK"]), 1) - 1
    dw, dlogit, temp_ = operator.empty_out(w), sizes.empty_rows(), temp.contiguous()
    totals, dmoments, denergies = sizes.empty_sums(nchunks, 2), sizes.empty_sums(nchunks), sizes.empty_sums(nchunks)
    arguments = {
        "dout_ptr": dout,
        "dmembership_ptr": None if dmembership is None else dmembership.contiguous(),
        "w_ptr": w,
        "temp_ptr": temp_,
        "membership_ptr": membership.contiguous(),
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
    with launch.guard(sizes.device):
        for step, sums in zip(_STEPS, (totals, dmoments, denergies, None), strict=True):
            launch.run(
                _tssa_causal_bwd_kernel, sizes.nsequences * nchunks, **arguments, **{s: s == step for s in _STEPS}
            )
            if sums is not None:
                scan_chunks(sums, reverse=sums is not totals)
        dtemp = denergies[:, 0, sizes.width :].sum(0)
        if denom_bias is None:
            return dw, dtemp.to(temp.dtype), temp.new_empty(0)
        ddenom_bias, dtemp_of_bias = through_bias(sizes, dlogit, temp_, denom_bias)
        dtemp += dtemp_of_bias
    return dw, dtemp.to(temp.dtype), ddenom_bias
