"""The gradient of ``denom_bias`` in Triton, and of ``temp`` through it: sums over the sequences of a batch.

It reads the gradient of the logits once, which is one row, and the bias, and writes the bias's gradient. A program has
BLOCK_N positions of some sequences and adds these in their order; where it takes several programs to fill the device, a
second launch adds their sums.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels._triton.jit import sequence_bounds
from crate_kernels.ops.tssa.triton import tile
from crate_kernels.ops.tssa.triton.launch import RUNTIME, TokenSizes, power_of_two
from crate_kernels.ops.tssa.triton.tile import TokenDims, TokenNumbers


@triton.jit(do_not_specialize=(*RUNTIME, "share", "nlengths"))
def _tssa_causal_dbias_kernel(
    dlogit_ptr,
    temp_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    lengths_ptr,
    dbias_ptr,
    dtemp_ptr,
    stride_bh,
    stride_bs,
    stride_pb,
    stride_ph,
    nsequences,
    nlengths,
    share,
    seqlen,
    total,
    NHEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BY_FOUR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum dlogit over ``share`` sequences, BLOCK_N positions per program; with ``temp``, write ddenom_bias.

    With the bias, write dtemp too. The bias is read as far as the longest of the ``nlengths`` sequences of
    ``lengths_ptr``: behind it, it may be -inf, and no gradient times that is NaN.
    BY_FOUR: ``seqlen`` and both strides are multiples of 4, so that a thread has four neighbouring tokens.
    """
    DIMS: tl.constexpr = TokenDims(NHEADS, HEAD_DIM, BLOCK_H, 1, False)
    if BY_FOUR:
        seqlen, stride_pb, stride_ph = seqlen // 4 * 4, stride_pb // 4 * 4, stride_ph // 4 * 4
    nblocks = tl.maximum(tl.cdiv(seqlen, BLOCK_N), 1)
    block, part = tl.program_id(0) % nblocks, tl.program_id(0) // nblocks
    rows, heads = block * BLOCK_N + tl.arange(0, BLOCK_N), tile.heads_of(DIMS)
    acc = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for index in tl.range(part * share, tl.minimum((part + 1) * share, nsequences)):
        start, count = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, cu_seqlens_ptr is not None)
        at = tl.cast(index, tl.int64) * stride_pb + start
        acc += tile.load_rows(TokenNumbers(dlogit_ptr + at, stride_ph), rows, count, DIMS)
    if temp_ptr is not None:
        acc *= HEAD_DIM  # the bias enters the similarity once per channel
    if bias_ptr is not None:
        longest = tl.where(nlengths > 0, seqlen, 0)
        if lengths_ptr is not None:
            longest = 0
            for start in tl.range(0, nlengths, BLOCK_N):
                indices = tl.minimum(start + tl.arange(0, BLOCK_N), nlengths - 1)
                _, counts = sequence_bounds(lengths_ptr, indices, seqlen, total, True)
                longest = tl.maximum(longest, tl.max(counts, 0))
        inside = (rows < longest)[:, None] & (heads < NHEADS)[None, :]
        places = heads.to(tl.int64)[None, :] * stride_bh + rows.to(tl.int64)[:, None] * stride_bs
        bias = tl.load(bias_ptr + places, mask=inside, other=0.0).to(tl.float32)  # (BLOCK_N, BLOCK_H)
        tile.store_heads(dtemp_ptr + block.to(tl.int64) * NHEADS, tl.sum(acc * bias, 0), DIMS)
    if temp_ptr is not None:
        acc *= tile.load_heads(temp_ptr, DIMS)[None, :]
    tile.store_rows(
        TokenNumbers(dbias_ptr + part.to(tl.int64) * NHEADS * seqlen, seqlen), acc, rows, rows < seqlen, DIMS
    )


def through_bias(
    sizes: TokenSizes, dlogit: Tensor, temp: Tensor, denom_bias: Tensor, through_temp: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the bias and, if wanted, of ``temp`` through it."""
    block, heads, seqlen = 64, sizes.nheads, sizes.seqlen
    nblocks = max(1, -(-seqlen // block))
    nparts = max(1, min(-(-sizes.nsequences // 4), 4 * launch.multiprocessors(sizes.device) // nblocks))
    gradient = denom_bias.new_empty(denom_bias.shape, dtype=torch.float32)
    dtemps = denom_bias.new_empty(nblocks, heads, dtype=torch.float32) if through_temp else None
    shared = sizes.arguments()
    cu_seqlens = sizes.call.cu_seqlens
    names = ("stride_pb", "stride_ph", "nsequences", "seqlen", "total")
    strides = denom_bias.stride() if through_temp else (0, 0)
    arguments = {"dlogit_ptr": dlogit, "BLOCK_N": block, "BLOCK_H": power_of_two(heads), "num_warps": 4}
    arguments |= {"dtemp_ptr": dtemps, "stride_bh": strides[0], "stride_bs": strides[1]}
    arguments |= {name: shared[name] for name in names}
    arguments |= {"cu_seqlens_ptr": cu_seqlens, "lengths_ptr": cu_seqlens, "nlengths": sizes.nsequences}
    arguments |= {"NHEADS": heads, "HEAD_DIM": sizes.head_dim, "BY_FOUR": cu_seqlens is None and seqlen % 4 == 0}
    if nparts > 1:
        parts = gradient.new_empty(nparts, heads, seqlen)
        share = -(-sizes.nsequences // nparts)
        own = {"temp_ptr": None, "bias_ptr": None, "dbias_ptr": parts, "share": share}
        launch.run(_tssa_causal_dbias_kernel, nblocks * nparts, **arguments, **own)
        arguments |= {"dlogit_ptr": parts, "cu_seqlens_ptr": None, "nsequences": nparts}
        arguments |= {"stride_pb": heads * seqlen, "stride_ph": seqlen, "BY_FOUR": seqlen % 4 == 0}
    launch.run(
        _tssa_causal_dbias_kernel,
        nblocks,
        **arguments,
        temp_ptr=temp,
        bias_ptr=denom_bias if through_temp else None,
        dbias_ptr=gradient,
        share=arguments["nsequences"],
    )
    return gradient.to(denom_bias.dtype), None if dtemps is None else dtemps.sum(0)
