"""The causal form in Triton, backward: two scans from the last token to the first, over running sums summed again.

A program has one chunk, with every head of its tokens, and goes through it in tiles. Where a step scans backwards, the
running sums before each tile are added up again from the first-level cache, which costs less than to keep them. Steps,
each with what ``scan_chunks`` made of the one before:

======= ======================= ===================================================
step    passes over w and dout  leaves
======= ======================= ===================================================
TOTALS  1 read                  sums of Pi w^2, of Pi and of w^2
DMOMENT 2 reads                 sums of dM / s, and V
DLOGIT  2 reads                 the gradient of the logits; sums of dc / temp; dtemp
DW      2 reads, 1 write        dw
======= ======================= ===================================================

7 reads and 1 write, 7 launches (4 where a sequence is one chunk), and 1 for ddenom_bias. Beside them the membership
three times, the gradient of the logits twice or three times, each 1 / head_dim of a pass in fp32, and the chunks'
sums, 4 / CHUNK of a pass in fp32, three to five times. No atomics: every sum has one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels import _launch, _register
from crate_kernels._jit import keep_mask, sequence_bounds
from crate_kernels.ops.tssa.triton_launch import CAUSAL_BACKWARD, RUNTIME, Call, causal_tile, power_of_two
from crate_kernels.ops.tssa.triton_tile import (
    CAUSAL_FLOOR,
    MASS_FLOOR,
    after_chunk,
    before_chunk,
    clear_uncovered,
    floored,
    kept,
    load_rows,
    load_tokens,
    scan_chunks,
    softmax_backward,
    store_rows,
    store_sums,
    store_tokens,
    suffix_sums,
)

_STEPS = ("TOTALS", "DMOMENT", "DLOGIT", "DW")


@triton.jit
def _add_tokens(
    moment,
    mass,
    energy,
    w_ptr,
    membership_ptr,
    mask_ptr,
    first,
    last,
    stride_ws,
    stride_wh,
    stride_wd,
    stride_ms,
    stride_ph,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add tokens ``first`` to ``last`` to the sums of Pi w^2, of Pi and of w^2."""
    heads, channels = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = n + tl.arange(0, BLOCK_N)
        w = load_tokens(w_ptr, rows, heads, channels, last, stride_ws, stride_wh, stride_wd, NHEADS, HEAD_DIM)
        members = load_rows(membership_ptr, rows, heads, last, stride_ph, NHEADS)
        keep = kept(mask_ptr, rows, last, stride_ms)
        weights = members * keep[:, None]
        moment += tl.sum(w * w * weights[:, :, None], 0)
        mass += tl.sum(weights, 0)
        energy += tl.sum(w * w * keep[:, None, None], 0)
    return moment, mass, energy


@triton.jit
def _through_moment(w, g, members, weights, moment, mass):
    """Return g A, dM / s (both by element) and the terms of V (by token and head) of a tile."""
    masses = (mass[None, :] + tl.cumsum(weights, 0) + MASS_FLOOR)[:, :, None]
    moments = moment[None, :, :] + tl.cumsum(w * w * weights[:, :, None], 0)
    inverse = 1.0 / (moments + masses)
    gate = g * inverse * masses
    slope = gate * w * inverse * members[:, :, None]
    return gate, slope, -tl.sum(slope * moments / masses, 2)


@triton.jit
def _load_gradient(
    dout_ptr,
    seed_ptr,
    rows,
    heads,
    channels,
    last,
    index,
    stride_gs,
    stride_gh,
    stride_gd,
    drop_last,
    inverse_keep,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load a tile of dout, times the dropout factor."""
    g = load_tokens(dout_ptr, rows, heads, channels, last, stride_gs, stride_gh, stride_gd, NHEADS, HEAD_DIM)
    if seed_ptr is not None:
        head, row = (index * NHEADS + heads)[None, :, None], rows[:, None, None] + heads[None, :, None] * 0
        g = tl.where(keep_mask(tl.load(seed_ptr), head, row, channels[None, None, :], drop_last), g * inverse_keep, 0.0)
    return g


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
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do one step on chunk ``pid % nchunks`` of a sequence.

    ``totals_ptr`` has the sums of Pi w^2 and Pi, ``energies_ptr`` those of w^2, ``dmoments_ptr`` those of dM / s and
    V, ``denergies_ptr`` those of dc / temp: of a chunk where the step stores them, up to it or from it on afterwards.
    """
    PACKED: tl.constexpr = cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk = pid // nchunks, pid % nchunks
    index64 = index.to(tl.int64)
    start, count = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, PACKED)
    origin = tl.full((), 0, tl.int64) + start
    first = chunk * chunk_size
    last = tl.minimum(first + chunk_size, count)
    heads, channels = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    w_ptr += index64 * stride_wb + origin * stride_ws
    dout_ptr += index64 * stride_gb + origin * stride_gs
    rows_at = index64 * stride_pb + origin
    membership_ptr += rows_at
    dlogit_ptr += rows_at
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb
    nothing = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    nobody = tl.zeros((BLOCK_H,), tl.float32)

    moment, mass, energy = nothing, nobody, nothing
    if not TOTALS:
        moment, mass = before_chunk(totals_ptr, pid, chunk, heads, channels, NHEADS, HEAD_DIM)
        energy, _ = before_chunk(energies_ptr, pid, chunk, heads, channels, NHEADS, HEAD_DIM)
    here = pid.to(tl.int64) * (NHEADS * (HEAD_DIM + 1))

    if TOTALS:
        moment, mass, energy = _add_tokens(
            moment,
            mass,
            energy,
            w_ptr,
            membership_ptr,
            mask_ptr,
            first,
            last,
            stride_ws,
            stride_wh,
            stride_wd,
            stride_ms,
            stride_ph,
            NHEADS,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_H,
            BLOCK_D,
            STAGES,
        )
        store_sums(totals_ptr + here, moment, mass, heads, channels, NHEADS, HEAD_DIM)
        store_sums(energies_ptr + here, energy, nobody, heads, channels, NHEADS, HEAD_DIM)

    if DMOMENT:
        dmoment, dmass = nothing, nobody
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = load_tokens(w_ptr, rows, heads, channels, last, stride_ws, stride_wh, stride_wd, NHEADS, HEAD_DIM)
            g = _load_gradient(
                dout_ptr,
                seed_ptr,
                rows,
                heads,
                channels,
                last,
                index,
                stride_gs,
                stride_gh,
                stride_gd,
                drop_last,
                inverse_keep,
                NHEADS,
                HEAD_DIM,
            )
            members = load_rows(membership_ptr, rows, heads, last, stride_ph, NHEADS)
            weights = members * kept(mask_ptr, rows, last, stride_ms)[:, None]
            _gate, slope, dmasses = _through_moment(w, g, members, weights, moment, mass)
            moment += tl.sum(w * w * weights[:, :, None], 0)
            mass += tl.sum(weights, 0)
            dmoment += tl.sum(slope, 0)
            dmass += tl.sum(dmasses, 0)
        store_sums(dmoments_ptr + here, dmoment, dmass, heads, channels, NHEADS, HEAD_DIM)

    if DLOGIT or DW:
        temp = tl.load(temp_ptr + heads, mask=heads < NHEADS, other=0.0).to(tl.float32)
        dmoment, dmass = after_chunk(dmoments_ptr, pid, chunk, nchunks, heads, channels, NHEADS, HEAD_DIM)
        denergy, dtemp = nothing, nobody
        if DW:
            denergy, _ = after_chunk(denergies_ptr, pid, chunk, nchunks, heads, channels, NHEADS, HEAD_DIM)
        ntiles = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
        for tile in tl.range(0, ntiles):
            n = first + (ntiles - 1 - tile) * BLOCK_N
            rows = n + tl.arange(0, BLOCK_N)
            w = load_tokens(w_ptr, rows, heads, channels, last, stride_ws, stride_wh, stride_wd, NHEADS, HEAD_DIM)
            g = _load_gradient(
                dout_ptr,
                seed_ptr,
                rows,
                heads,
                channels,
                last,
                index,
                stride_gs,
                stride_gh,
                stride_gd,
                drop_last,
                inverse_keep,
                NHEADS,
                HEAD_DIM,
            )
            members = load_rows(membership_ptr, rows, heads, last, stride_ph, NHEADS)
            keep = kept(mask_ptr, rows, last, stride_ms)
            weights = members * keep[:, None]
            tile_moment, tile_mass, tile_energy = _add_tokens(
                moment,
                mass,
                energy,
                w_ptr,
                membership_ptr,
                mask_ptr,
                first,
                n,
                stride_ws,
                stride_wh,
                stride_wd,
                stride_ms,
                stride_ph,
                NHEADS,
                HEAD_DIM,
                BLOCK_N,
                BLOCK_H,
                BLOCK_D,
                STAGES,
            )
            gate, slope, dmasses = _through_moment(w, g, members, weights, tile_moment, tile_mass)
            dmoments = dmoment[None, :, :] + suffix_sums(slope, BLOCK_N, BLOCK_H, BLOCK_D)
            squares = w * w
            if DLOGIT:
                later = tl.reshape(suffix_sums(dmasses[:, :, None], BLOCK_N, BLOCK_H, 1), (BLOCK_N, BLOCK_H))
                shared = tl.sum(dmoments * squares, 2) + dmass[None, :] + later
                dmembers = shared * keep[:, None] - tl.sum(gate * w, 2)
                if dmembership_ptr is not None:
                    dmembers += load_rows(dmembership_ptr + rows_at, rows, heads, last, stride_ph, NHEADS)
                dlogit = softmax_backward(members, dmembers)
                store_rows(dlogit_ptr, dlogit, rows, heads, last, stride_ph, NHEADS)
            else:
                dlogit = load_rows(dlogit_ptr, rows, heads, last, stride_ph, NHEADS)
            counted = squares * keep[:, None, None]
            running = tile_energy[None, :, :] + tl.cumsum(counted, 0)
            energies = floored(running, CAUSAL_FLOOR)
            above = running > CAUSAL_FLOOR
            per_energy = dlogit[:, :, None] / energies
            denergies = tl.where(above, per_energy * squares / energies, 0.0)
            if DLOGIT:
                dtemp += tl.sum(tl.sum(per_energy * squares, 2), 0)
            else:
                # The sums without the token itself: what it gets from itself, 1 / c - w^2 / c^2, is one term, in
                # which a first token cancels exactly.
                later_energy = denergy[None, :, :] + (suffix_sums(denergies, BLOCK_N, BLOCK_H, BLOCK_D) - denergies)
                own = per_energy * tl.where(above, (running - counted) / energies, 1.0)
                dw = temp[None, :, None] * (own - later_energy * keep[:, None, None])
                dw = 2.0 * w * (dw + dmoments * weights[:, :, None]) - gate * members[:, :, None]
                tokens_ptr = dw_ptr + index64 * stride_ob + origin * stride_os
                store_tokens(tokens_ptr, dw, rows, heads, channels, last, stride_os, stride_oh, NHEADS, HEAD_DIM)
            denergy += tl.sum(denergies, 0)
            dmoment += tl.sum(slope, 0)
            dmass += tl.sum(dmasses, 0)
        if DLOGIT:
            store_sums(denergies_ptr + here, denergy, dtemp, heads, channels, NHEADS, HEAD_DIM)
    if PACKED and DW and chunk == 0:
        clear_uncovered(
            dw_ptr,
            None,
            cu_seqlens_ptr,
            index,
            nsequences,
            start,
            count,
            total,
            stride_os,
            stride_oh,
            stride_ph,
            NHEADS,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_H,
            BLOCK_D,
        )


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_causal_dbias_kernel(
    dlogit_ptr,
    temp_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    dbias_ptr,
    dtemp_ptr,
    stride_bh,
    stride_bs,
    stride_pb,
    stride_ph,
    nsequences,
    seqlen,
    total,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum dlogit over the sequences, BLOCK_N positions a program: ddenom_bias, and the bias's part of dtemp."""
    pid = tl.program_id(0)
    rows, heads = pid * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for index in tl.range(0, nsequences):
        start, count = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, cu_seqlens_ptr is not None)
        at = tl.cast(index, tl.int64) * stride_pb + start
        acc += load_rows(dlogit_ptr + at, rows, heads, count, stride_ph, NHEADS)
    inside = (rows < seqlen)[:, None] & (heads < NHEADS)[None, :]
    places = heads.to(tl.int64)[None, :] * stride_bh + rows.to(tl.int64)[:, None] * stride_bs
    bias = tl.load(bias_ptr + places, mask=inside, other=0.0).to(tl.float32)
    temp = tl.load(temp_ptr + heads, mask=heads < NHEADS, other=0.0).to(tl.float32)
    # The bias enters the similarity once a channel.
    acc *= HEAD_DIM
    store_rows(dbias_ptr, temp[None, :] * acc, rows, heads, seqlen, seqlen, NHEADS)
    tl.store(dtemp_ptr + pid.to(tl.int64) * NHEADS + heads, tl.sum(acc * bias, 0), mask=heads < NHEADS)


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    call = Call(w, key_padding_mask, cu_seqlens, max_seqlen, seed, dropout_p)
    tile, nchunks = causal_tile(CAUSAL_BACKWARD, call)
    dw, dlogit, temp_ = _register.empty_out(w), call.empty_rows(), temp.contiguous()
    totals, dmoments, denergies = call.empty_sums(nchunks, 2), call.empty_sums(nchunks), call.empty_sums(nchunks)
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
        **call.arguments(),
        **call.strides("g", dout),
        **call.strides("w", w),
        **call.strides("o", dw, contiguous=True),
        **tile,
    }
    with _launch.guard(call.device):
        for step, sums in zip(_STEPS, (totals, dmoments, denergies, None), strict=True):
            _tssa_causal_bwd_kernel[(call.nsequences * nchunks,)](**arguments, **{s: s == step for s in _STEPS})
            if sums is not None:
                scan_chunks(sums, reverse=sums is not totals)
        dtemp = denergies[:, 0, call.width :].sum(0)
        if denom_bias is None:
            return dw, dtemp.to(temp.dtype), temp.new_empty(0)
        ddenom_bias, through_bias = _through_bias(call, dlogit, temp_, denom_bias)
        dtemp += through_bias
    return dw, dtemp.to(temp.dtype), ddenom_bias


def _through_bias(call: Call, dlogit: Tensor, temp: Tensor, denom_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the bias, and of ``temp`` through it."""
    block = 64
    nblocks = max(1, -(-call.seqlen // block))
    gradient = denom_bias.new_empty(denom_bias.shape, dtype=torch.float32)
    parts = denom_bias.new_empty(nblocks, call.nheads, dtype=torch.float32)
    shared = call.arguments()
    names = ("cu_seqlens_ptr", "stride_pb", "stride_ph", "nsequences", "seqlen", "total", "NHEADS", "HEAD_DIM")
    _tssa_causal_dbias_kernel[(nblocks,)](
        dlogit_ptr=dlogit,
        temp_ptr=temp,
        bias_ptr=denom_bias,
        dbias_ptr=gradient,
        dtemp_ptr=parts,
        stride_bh=denom_bias.stride(0),
        stride_bs=denom_bias.stride(1),
        **{name: shared[name] for name in names},
        BLOCK_N=block,
        BLOCK_H=power_of_two(call.nheads),
        num_warps=4,
    )
    return gradient.to(denom_bias.dtype), parts.sum(0)
