"""The gradient of ``denom_bias`` in Triton, and of ``temp`` through it: sums over the sequences of a batch.

One launch reads the gradient of the logits once, which is one row, and the bias, and writes the bias's gradient. A
program has BLOCK_N positions and goes through the sequences in their order.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton.jit import sequence_bounds
from crate_kernels.ops.tssa.triton import tile
from crate_kernels.ops.tssa.triton.launch import RUNTIME, Launch, power_of_two
from crate_kernels.ops.tssa.triton.tile import Dims, Rows


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
    """Sum dlogit over the sequences, BLOCK_N positions per program: ddenom_bias, and the bias's part of dtemp."""
    pid = tl.program_id(0)
    DIMS: tl.constexpr = Dims(NHEADS, HEAD_DIM, BLOCK_H, 1)
    rows, heads = pid * BLOCK_N + tl.arange(0, BLOCK_N), tile.heads_of(DIMS)
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for index in tl.range(0, nsequences):
        start, count = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, cu_seqlens_ptr is not None)
        at = tl.cast(index, tl.int64) * stride_pb + start
        acc += tile.load_rows(Rows(dlogit_ptr + at, stride_ph), rows, count, DIMS)
    inside = (rows < seqlen)[:, None] & (heads < NHEADS)[None, :]
    places = heads.to(tl.int64)[None, :] * stride_bh + rows.to(tl.int64)[:, None] * stride_bs
    bias = tl.load(bias_ptr + places, mask=inside, other=0.0).to(tl.float32)
    # The bias enters the similarity once per channel.
    acc *= HEAD_DIM
    tile.store_rows(Rows(dbias_ptr, seqlen), tile.load_heads(temp_ptr, DIMS)[None, :] * acc, rows, rows < seqlen, DIMS)
    tile.store_heads(dtemp_ptr + pid.to(tl.int64) * NHEADS, tl.sum(acc * bias, 0), DIMS)


def through_bias(sizes: Launch, dlogit: Tensor, temp: Tensor, denom_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the bias, and of ``temp`` through it."""
    block = 64
    nblocks = max(1, -(-sizes.seqlen // block))
    gradient = denom_bias.new_empty(denom_bias.shape, dtype=torch.float32)
    parts = denom_bias.new_empty(nblocks, sizes.nheads, dtype=torch.float32)
    shared = sizes.arguments()
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
        BLOCK_H=power_of_two(sizes.nheads),
        num_warps=4,
    )
    return gradient.to(denom_bias.dtype), parts.sum(0)
