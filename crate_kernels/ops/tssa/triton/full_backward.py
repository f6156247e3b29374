"""The full form in Triton, backward: three steps over the tokens, of which the second needs no upstream gradient.

``full.py`` says how it is launched, and counts its passes. q is never computed again: the sum of dlogit q is
sum_d (sum_n dlogit w^2) / c, whose inner sum dc needs as well.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.full import channel_gate
from crate_kernels.ops.tssa.triton.launch import RUNTIME, TokenSizes, run_full
from crate_kernels.ops.tssa.triton.members import softmax_backward
from crate_kernels.ops.tssa.triton.tables import FULL_BACKWARD
from crate_kernels.ops.tssa.triton.tile import TokenNumbers


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_bwd_kernel(
    dout_tokens, dmembership_ptr, w_tokens, temp_ptr, membership_ptr, energy_ptr, moment_ptr, masking,
    dw_tokens, dtemp_ptr, dgate_ptr, dlogit_ptr, sums, stride_mb, stride_pb, stride_ph,
    nsequences, nchunks, chunk_size, seqlen, total, drop_last,
    DGATE: tl.constexpr, DLOGIT: tl.constexpr, DW: tl.constexpr, DIMS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Do the steps DGATE, DLOGIT and DW, or one of them, on chunk ``pid % nchunks`` of a sequence.

    Sums are (NHEADS, HEAD_DIM) and (NHEADS,) behind them: first sum g w Pi and sum Pi, then sum dlogit w^2 and nothing.
    ``dgate_ptr`` has sum_d g w A of each token and head, ``dlogit_ptr`` the gradient of its logit. That gradient and
    its sums are in the head's own scale: w^2 times a small gradient underflows for channels which c itself still holds.
    Of float32 tokens it is w^2 / c that is summed, in no scale: exactly 1 where a token has all of c, it cancels.
    """
    BLOCK_H: tl.constexpr = DIMS.BLOCK_H
    BLOCK_D: tl.constexpr = DIMS.BLOCK_D
    PACKED: tl.constexpr = masking.cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk, origin, count, first, last = tile.chunk_of(
        pid, masking.cu_seqlens_ptr, nchunks, chunk_size, seqlen, total
    )
    index64 = index.to(tl.int64)
    w_at, dout_at = tile.tokens_at(w_tokens, index64, origin), tile.tokens_at(dout_tokens, index64, origin)
    dw_at = tile.tokens_at(dw_tokens, index64, origin)
    rows_at = index64 * stride_pb + origin
    membership_at = TokenNumbers(membership_ptr + rows_at, stride_ph)
    dgate_at, dlogit_at = TokenNumbers(dgate_ptr + rows_at, stride_ph), TokenNumbers(dlogit_ptr + rows_at, stride_ph)
    mask_ptr = masking.mask_ptr
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb
    energy = tile.floored(
        tile.load_channels(energy_ptr + index64 * (DIMS.NHEADS * DIMS.HEAD_DIM), DIMS), tile.FULL_FLOOR
    )
    inverse, rest = quotients.inverse_of(energy, DIMS)  # (BLOCK_H, BLOCK_D)
    scale = 1.0 / tl.minimum(tl.max(energy, 1), 1.0)  # (BLOCK_H,)
    if DIMS.WIDE:
        scale = tl.full((BLOCK_H,), 1.0, tl.float32)
    moment = tile.load_channels(moment_ptr + index64 * (DIMS.NHEADS * DIMS.HEAD_DIM), DIMS)  # (BLOCK_H, BLOCK_D)
    gate = channel_gate(moment, masking.seed_ptr, drop_last, masking.inverse_keep, index, DIMS)  # (BLOCK_H, BLOCK_D)

    if DGATE:
        acc = tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32)
        masses = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            product = tile.load_tokens(dout_at, rows, last, DIMS) * tile.load_tokens(w_at, rows, last, DIMS)
            members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            tile.store_rows(dgate_at, tl.sum(product * gate[None, :, :], 2), rows, rows < last, DIMS)
            acc += product * members[:, :, None]
            masses += tile.counted(members, tile.kept(mask_ptr, rows, last, masking.stride_ms), mask_ptr)
        by_channel, mass = tl.sum(acc, 0), tl.sum(masses, 0)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
        if not DLOGIT:
            tile.store_sums(sums.parts_ptr, pid, by_channel, mass, DIMS)
    if not DGATE:
        by_channel, mass = tile.load_sums(sums.first_ptr, index, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)

    if DLOGIT or DW:
        dmoment = by_channel * gate / (1.0 + moment) / (mass + tile.MASS_FLOOR)[:, None]  # (BLOCK_H, BLOCK_D)
        dmass = -tl.sum(dmoment * moment, 1)  # (BLOCK_H,)
    if DLOGIT:
        if DGATE:
            # Threads read what others stored in the step before.
            tl.debug_barrier()
        acc = tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_tokens(w_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
            shared = tl.sum(squares * dmoment[None, :, :], 2) + dmass[None, :]  # (BLOCK_N, BLOCK_H)
            dmembers = tile.counted(shared, tile.kept(mask_ptr, rows, last, masking.stride_ms), mask_ptr)
            dmembers -= tile.load_rows(dgate_at, rows, last, DIMS)
            if dmembership_ptr is not None:
                dmembers += tile.load_rows(TokenNumbers(dmembership_ptr + rows_at, stride_ph), rows, last, DIMS)
            dlogit = softmax_backward(tile.load_rows(membership_at, rows, last, DIMS), dmembers) * scale[None, :]
            tile.store_rows(dlogit_at, dlogit, rows, rows < last, DIMS)
            if DIMS.WIDE:
                squares = quotients.ratio_of(squares, inverse[None, :, :], rest[None, :, :], DIMS)
            acc += dlogit[:, :, None] * squares
        denergy = tl.sum(acc, 0)  # (BLOCK_H, BLOCK_D)
        if not DW:
            tile.store_sums(sums.parts_ptr, pid, denergy, tl.zeros((BLOCK_H,), tl.float32), DIMS)

    if DW:
        if not DLOGIT:
            denergy, _ = tile.load_sums(sums.second_ptr, index, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
        else:
            tl.debug_barrier()
        similarity = denergy  # (BLOCK_H, BLOCK_D)
        if not DIMS.WIDE:
            similarity = denergy / energy
        if chunk == 0:
            tile.store_heads(dtemp_ptr + index64 * DIMS.NHEADS, tl.sum(similarity, 1) / scale, DIMS)
        twice = 2.0 * tile.load_heads(temp_ptr, DIMS)[:, None] / energy / scale[:, None]  # (BLOCK_H, BLOCK_D)
        # A single token is its own sum: w^2 / c is 1 whatever w is, and two large terms need not cancel.
        above = energy > tile.FULL_FLOOR
        twice = tl.where(above & (count == 1), 0.0, twice)
        similarity = tl.where(above, similarity, 0.0)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w, g = tile.load_tokens(w_at, rows, last, DIMS), tile.load_tokens(dout_at, rows, last, DIMS)
            members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            dlogit = tile.load_rows(dlogit_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            keep = tile.kept(mask_ptr, rows, last, masking.stride_ms)  # (BLOCK_N,)
            slope = (2.0 * tile.counted(members, keep, mask_ptr))[:, :, None] * dmoment[None, :, :]
            mean = tile.counted(tl.broadcast_to(similarity[None, :, :], w.shape), keep, mask_ptr)
            slope += (dlogit[:, :, None] - mean) * twice[None, :, :]
            dw = w * slope - g * members[:, :, None] * gate[None, :, :]  # (BLOCK_N, BLOCK_H, BLOCK_D)
            tile.store_tokens(dw_at, dw, rows, rows < last, DIMS)
        if PACKED and chunk == 0:
            dw_at = tile.tokens_at(dw_tokens, 0, 0)
            tile.clear_uncovered(dw_at, None, masking.cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS)


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    op_checks.backward(dout, dmembership, w, temp, membership, energy, moment, call)
    sizes = TokenSizes(w, call)
    dw, scratch = operator.empty_out(w), sizes.empty_rows(2)
    dtemp = w.new_empty(sizes.nsequences, sizes.nheads, dtype=torch.float32)
    arguments = {
        "dout_tokens": sizes.strided(dout),
        "w_tokens": sizes.strided(w),
        "dw_tokens": sizes.strided(dw),
        "dmembership_ptr": None if dmembership is None else dmembership.contiguous(),
        "temp_ptr": temp.contiguous(),
        "membership_ptr": membership.contiguous(),
        "energy_ptr": energy.contiguous(),
        "moment_ptr": moment.contiguous(),
        "dtemp_ptr": dtemp,
        "dgate_ptr": scratch[0],
        "dlogit_ptr": scratch[1],
        **sizes.arguments(),
    }
    run_full(_tssa_bwd_kernel, FULL_BACKWARD, ("DGATE", "DLOGIT", "DW"), sizes, arguments)
    return dw, dtemp.sum(0).to(temp.dtype)
