"""The forward of subspace attention in Triton: a tile of w, once on chip, is both key and value.

The symbols of docs/mssa.md, ``s_ij = scale * w_i . w_j``. A program owns BLOCK_M rows i and walks over tiles of
BLOCK_N keys j: two products per tile, 4 seqlen^2 head_dim FLOP per head (half of it when causal). Memory gives w once,
and once more to ``_mssa_norms_kernel`` where the softmax is bounded; it takes out and lse once. rows.py has the
walk and the two forms of the softmax.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._triton import jit, launch
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import MSSACall, empty_lse
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.head import find_head, form_of, largest, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.launch import HeadSizes, strided
from crate_kernels.ops.mssa.triton.rows import attend_rows, norms


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m"])
def _mssa_norms_kernel(
    w, max_norms_ptr, nheads, seqlen, total, call, num_m, BLOCK_M: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Write the largest n = s_kk / 2 of every block of BLOCK_M rows to max_norms (heads, num_m)."""
    pid = tl.program_id(0)
    head = find_head(pid // num_m, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    offs_m = pid % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    w_m = tile.load(tokens_of(head, w), offs_m, offs_m < head.length, FORM)  # (BLOCK_M, HEAD_DIM)
    tl.store(max_norms_ptr + pid, tl.max(norms(w_m, call.qk_scale), 0))


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_m"])
def _mssa_fwd_kernel(
    w, out, lse_ptr, max_norms_ptr, nheads, seqlen, total, call, num_m,
    BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write out and lse of a block of rows.

    The last block has TAIL_M rows, and the last keys come in tiles of TAIL_N: 197 rows cost 208 and not 256.
    """
    pid = tl.program_id(0)
    # Causal: begin with the longest rows, which else would run last and alone.
    pid_m = num_m - 1 - pid % num_m if FORM.CAUSAL else pid % num_m
    head = find_head(pid // num_m, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    every = tile.TokenRows(out.ptr + head.h.to(tl.int64) * out.stride_h, out.stride_s, out.stride_d)
    w, out = tokens_of(head, w), tokens_of(head, out)
    lse_ptr += head.row
    scores = scores_of(head, seqlen, call, FORM)
    max_norm = 0.0
    start_m = pid_m * BLOCK_M
    if FORM.SOFTMAX == "bounded":
        max_norm = largest(max_norms_ptr + head.number.to(tl.int64) * num_m, pid_m if FORM.CAUSAL else num_m)
    if TAIL_M < BLOCK_M:
        if pid_m == num_m - 1:
            attend_rows(w, out, lse_ptr, scores, start_m, max_norm, TAIL_M, FORM)
        else:
            attend_rows(w, out, lse_ptr, scores, start_m, max_norm, BLOCK_M, FORM)
    elif start_m < head.length:
        attend_rows(w, out, lse_ptr, scores, start_m, max_norm, BLOCK_M, FORM)
    if FORM.PACKED:
        sequences = tl.num_programs(0) // (nheads * num_m)
        lead, first, stop = jit.uncovered(call.cu_seqlens_ptr, head.batch, sequences, seqlen, total)
        tile.zero_rows(every, lead, first, stop, pid_m, num_m, BLOCK_M, FORM)
        tile.zero_numbers(lse_ptr - head.start.to(tl.int64), lead, first, stop, pid_m, num_m, BLOCK_M)


_MASKED_KEYS = 64  # keys per tile where masks cut: they take registers that wider tiles do not leave


def forward(w: Tensor, call: MSSACall) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    op_checks.forward(w, call)
    out, lse = operator.empty_out(w), empty_lse(w)
    if out.numel() == 0:
        return out, lse
    sizes = HeadSizes(w, call)
    config = dict(tables.FORWARD.config(w.device, sizes.head_dim, sizes.seqlen, call.causal, w.dtype))
    bounded = bool(config.pop("BOUNDED"))
    block_m, block_n = config.pop("BLOCK_M"), config.pop("BLOCK_N")
    num_m = sizes.blocks(block_m)
    softmax = call.threshold is None and call.scale > 0
    # fp16 holds weights down to 2^-24 only: all of a row may be smaller in the bounded form, never in the online one.
    # A query that does not see itself has a sum without a lower bound.
    bounded = bounded and softmax and w.dtype != torch.float16 and not call.may_be_empty
    kind = "bounded" if bounded else "online" if call.threshold is None else "threshold"
    tail_n = min(block_n, _MASKED_KEYS) if call.causal else min(sizes.tail(block_n), _MASKED_KEYS)
    shared = {"w": strided(w), "num_m": num_m, "BLOCK_M": block_m, **sizes.arguments()}
    max_norms = w.new_empty(sizes.heads, num_m, dtype=torch.float32) if bounded else None
    with launch.guard(w.device):
        if max_norms is not None:
            norms_form = form_of(*tile.split_dims(sizes.head_dim), PACKED=call.packed)
            launch.run(_mssa_norms_kernel, sizes.heads * num_m, **shared, max_norms_ptr=max_norms, FORM=norms_form)
        launch.run(
            _mssa_fwd_kernel,
            sizes.heads * num_m,
            **shared,
            out=strided(out),
            lse_ptr=lse,
            max_norms_ptr=max_norms,
            TAIL_M=sizes.tail(block_m),
            FORM=sizes.form(block_n, tail_n, softmax=kind),
            **config,
        )
    return out, lse
