"""The full form in Triton, forward: three steps over the tokens, each with what the one before summed over all of them.

Where one program has a whole sequence, one launch does all steps: it reads w from memory once, and again from the L2
cache, which holds what the programs of one wave read. Longer sequences are cut into chunks: then each step is a launch
of its own, with the chunks' sums added up in between. ``full_backward.py`` has the same two ways.

Traffic from memory as (read, written). A pass is one tensor of w's size, batch * nheads * seqlen * head_dim * itemsize
bytes; a row is the membership or scratch like it, batch * nheads * seqlen * 4 bytes. The floors are the minimum
without sums from the producer of w. There is no matrix product.

============== =============== ============== =============== ============== ======== =======
way            forward passes  forward rows   backward passes backward rows  launches floors
============== =============== ============== =============== ============== ======== =======
whole sequence 1, 1            0, 1           2, 1            1, 2           1 + 1    2 and 3
chunks         3, 1            1, 1           5, 1            5, 2           3 + 3    4 and 6
============== =============== ============== =============== ============== ======== =======

A gradient of the membership is one row more to read. Chunks add the sums between two steps, fp32, 1 / CHUNK of a pass
each, written and read by one ``torch.sum`` per step. Energies and moments, (batch, nheads, head_dim) in fp32, are
written and read back. There are no atomics: every sum has one order, whatever runs first.
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
from crate_kernels._triton.jit import keep_mask
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton import quotients, tile
from crate_kernels.ops.tssa.triton.launch import RUNTIME, TokenSizes, run_full
from crate_kernels.ops.tssa.triton.members import softmax_over_heads, sum_over_channels
from crate_kernels.ops.tssa.triton.tables import FULL_FORWARD
from crate_kernels.ops.tssa.triton.tile import TokenNumbers


@triton.jit
def channel_gate(moment, seed_ptr, drop_last, inverse_keep, index, DIMS: tl.constexpr):
    """Return A = 1 / (1 + M), times the dropout factor of each channel, (BLOCK_H, BLOCK_D)."""
    gate = 1.0 / (1.0 + moment)  # (BLOCK_H, BLOCK_D)
    if seed_ptr is not None:
        heads = tile.heads_of(DIMS)[:, None]
        keep = keep_mask(
            tl.load(seed_ptr), index * DIMS.NHEADS + heads, heads * 0, tile.channels_of(DIMS)[None, :], drop_last
        )
        gate = tl.where(keep, gate * inverse_keep, 0.0)
    return gate


@triton.jit(do_not_specialize=RUNTIME)
def _tssa_fwd_kernel(
    w_tokens, out_tokens, temp_ptr, membership_ptr, energy_ptr, moment_ptr, sums, masking, stride_mb, stride_pb,
    stride_ph, nsequences, nchunks, chunk_size, seqlen, total, drop_last,
    ENERGY: tl.constexpr, MEMBERS: tl.constexpr, OUTPUT: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do the steps ENERGY, MEMBERS and OUTPUT, or one of them, on chunk ``pid % nchunks`` of a sequence.

    Sums are (NHEADS, HEAD_DIM) and (NHEADS,) behind them: first sum w^2 and the number of kept tokens, then
    sum Pi w^2 and sum Pi. A step stores its chunk's; ``sums`` has the sequence's.
    """
    BLOCK_H: tl.constexpr = DIMS.BLOCK_H
    BLOCK_D: tl.constexpr = DIMS.BLOCK_D
    PACKED: tl.constexpr = masking.cu_seqlens_ptr is not None
    pid = tl.program_id(0)
    index, chunk, origin, _count, first, last = tile.chunk_of(
        pid, masking.cu_seqlens_ptr, nchunks, chunk_size, seqlen, total
    )
    index64 = index.to(tl.int64)
    w_at, out_at = tile.tokens_at(w_tokens, index64, origin), tile.tokens_at(out_tokens, index64, origin)
    membership_at = TokenNumbers(membership_ptr + index64 * stride_pb + origin, stride_ph)
    mask_ptr = masking.mask_ptr
    if mask_ptr is not None:
        mask_ptr += index64 * stride_mb

    if ENERGY:
        acc = tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32)
        kept_tokens = tl.zeros((BLOCK_N,), tl.float32)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_tokens(w_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            keep = tile.kept(mask_ptr, rows, last, masking.stride_ms)  # (BLOCK_N,)
            acc += tile.counted(w * w, keep, mask_ptr)
            kept_tokens += keep
        energy = tl.sum(acc, 0)  # (BLOCK_H, BLOCK_D)
        keys = tl.sum(kept_tokens, 0) + tl.zeros((BLOCK_H,), tl.float32)
        if not MEMBERS:
            tile.store_sums(sums.parts_ptr, pid, energy, keys, DIMS)

    if MEMBERS:
        if not ENERGY:
            energy, keys = tile.load_sums(sums.first_ptr, index, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
        energy = tile.floored(energy, tile.FULL_FLOOR)
        if chunk == 0:
            tile.store_channels(energy_ptr + index64 * (DIMS.NHEADS * DIMS.HEAD_DIM), energy, DIMS)
        inverse, rest = quotients.inverse_of(energy, DIMS)  # (BLOCK_H, BLOCK_D)
        temp = tile.load_heads(temp_ptr, DIMS)  # (BLOCK_H,)
        acc = tl.zeros((BLOCK_N, BLOCK_H, BLOCK_D), tl.float32)
        masses = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_tokens(w_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            squares = w * w  # (BLOCK_N, BLOCK_H, BLOCK_D)
            ratio = quotients.ratio_of(squares, inverse[None, :, :], rest[None, :, :], DIMS)
            similarity = sum_over_channels(ratio, DIMS)  # (BLOCK_N, BLOCK_H)
            members = softmax_over_heads(temp, similarity, rows < last, DIMS)  # (BLOCK_N, BLOCK_H)
            if mask_ptr is not None:
                # Without a kept token, out and every gradient vanish with the membership.
                members = tl.where(keys[None, :] > 0, members, 0.0)
            tile.store_rows(membership_at, members, rows, rows < last, DIMS)
            weights = tile.counted(members, tile.kept(mask_ptr, rows, last, masking.stride_ms), mask_ptr)
            acc += weights[:, :, None] * squares
            masses += weights
        moment = tl.sum(acc, 0)  # (BLOCK_H, BLOCK_D)
        mass = tl.sum(masses, 0)  # (BLOCK_H,)
        if not OUTPUT:
            tile.store_sums(sums.parts_ptr, pid, moment, mass, DIMS)

    if OUTPUT:
        if not MEMBERS:
            moment, mass = tile.load_sums(sums.second_ptr, index, DIMS)  # (BLOCK_H, BLOCK_D), (BLOCK_H,)
        moment = moment / (mass + tile.MASS_FLOOR)[:, None]  # (BLOCK_H, BLOCK_D)
        if chunk == 0:
            tile.store_channels(moment_ptr + index64 * (DIMS.NHEADS * DIMS.HEAD_DIM), moment, DIMS)
        gate = channel_gate(moment, masking.seed_ptr, drop_last, masking.inverse_keep, index, DIMS)
        if MEMBERS:
            # Threads read back the membership that others stored.
            tl.debug_barrier()
        for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            rows = n + tl.arange(0, BLOCK_N)
            w = tile.load_tokens(w_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H, BLOCK_D)
            members = tile.load_rows(membership_at, rows, last, DIMS)  # (BLOCK_N, BLOCK_H)
            tile.store_tokens(out_at, -w * members[:, :, None] * gate[None, :, :], rows, rows < last, DIMS)
        if PACKED and chunk == 0:
            out_at = tile.tokens_at(out_tokens, 0, 0)
            membership_at = TokenNumbers(membership_ptr, stride_ph)
            tile.clear_uncovered(
                out_at, membership_at, masking.cu_seqlens_ptr, index, nsequences, seqlen, total, BLOCK_N, DIMS
            )


def forward(
    w: Tensor,
    temp: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, membership, the column energies c and the second moments M."""
    op_checks.forward(w, temp, call)
    sizes = TokenSizes(w, call)
    out, membership = operator.empty_out(w), sizes.empty_rows()
    energy = w.new_empty(sizes.nsequences, sizes.nheads, sizes.head_dim, dtype=torch.float32)
    moment = torch.empty_like(energy)
    arguments = {
        "w_tokens": sizes.strided(w),
        "out_tokens": sizes.strided(out),
        "temp_ptr": temp.contiguous(),
        "membership_ptr": membership,
        "energy_ptr": energy,
        "moment_ptr": moment,
        **sizes.arguments(),
    }
    run_full(_tssa_fwd_kernel, FULL_FORWARD, ("ENERGY", "MEMBERS", "OUTPUT"), sizes, arguments)
    return out, membership, energy, moment
