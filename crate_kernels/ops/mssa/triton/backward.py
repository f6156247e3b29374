"""The backward of subspace attention in Triton: one accumulator, no atomics, bitwise deterministic.

The symbols of docs/mssa.md; g is the gradient of out, ``L`` is lse and ``dlse`` its gradient. A program owns BLOCK_J
rows j of w, as keys and as queries at once, and walks over tiles of BLOCK_I rows i. One tile of scores, which is
symmetric, has both directions in it:

    P_ij = exp(s_ij - L_i)  j as key of i,        P_ji = exp(s_ij - L_j)  j as query of i
    dw_j = sum_i  P_ij g_i + A_ij w_i
    A_ij = scale (P_ij (g_i.w_j - delta_i + dlse_i) + P_ji (g_j.w_i - delta_j + dlse_j))

Five products per tile, 10 seqlen^2 head_dim FLOP per head; dq, dk and dv apart would take seven products. Off the
causal diagonal one direction exists: four products after it, three before it. Memory gives g, out and lse once to the
kernel of delta.py, and w, g and two numbers per row to the main kernel; it takes dw once. terms.py has the walk.
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
from crate_kernels.ops.mssa import given
from crate_kernels.ops.mssa.call import Call
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.delta import _mssa_bwd_delta_kernel
from crate_kernels.ops.mssa.triton.head import find_head, largest, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.launch import Launch, strided
from crate_kernels.ops.mssa.triton.terms import Inputs, Terms, load_block, walk


@triton.jit
def _write_block(inputs, dw, scores, extent, start_j, BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr):
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head."""
    own = load_block(inputs, scores, start_j, scores.length, BLOCK_J, FORM, TERMS)
    acc = tile.zeros(BLOCK_J, FORM)  # (BLOCK_J, HEAD_DIM)
    if TERMS.SELECT:
        # Add up selected values first: the threshold is exact as a factor of the sum, and rounded as a weight.
        SELECTED: tl.constexpr = Terms(VALUES=True, SELECT=True)
        acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, SELECTED)
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + scores.call.threshold)
        if TERMS.SCORES:
            REST: tl.constexpr = Terms(SCORES=True, HAS_DLSE=True)
            acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, REST)
    else:
        acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, TERMS)
    offs_j = start_j + tl.arange(0, BLOCK_J)
    tile.store(dw, acc, offs_j, offs_j < scores.length, FORM)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_j", "num_m"])
def _mssa_bwd_kernel(
    g, w, dw, lse_ptr, factor_ptr, delta_ptr, dlse_ptr, extent_ptr, nheads, seqlen, total, call, num_j, num_m,
    BLOCK_J: tl.constexpr, TAIL_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows; the last block of a sequence has TAIL_J rows, the last tile TAIL_I."""
    tl.static_assert(BLOCK_J % FORM.BLOCK == 0)  # tiles after the diagonal start where it ends
    pid = tl.program_id(0)
    pid_j = pid % num_j
    head = find_head(pid // num_j, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    every = tile.Tokens(dw.ptr + head.h.to(tl.int64) * dw.stride_h, dw.stride_s, dw.stride_d)
    w, dw = tokens_of(head, w), tokens_of(head, dw)
    g = tokens_of(head, g) if TERMS.VALUES else w
    dlse_at = dlse_ptr + head.row if TERMS.HAS_DLSE else lse_ptr
    at = head.row
    inputs = Inputs(w, g, lse_ptr + at, factor_ptr + at, delta_ptr + at, dlse_at)
    scores = scores_of(head, seqlen, call, FORM)
    extent = 0.0
    if TERMS.DERIVED:
        extent = largest(extent_ptr + head.number.to(tl.int64) * num_m, num_m)
    start_j = pid_j * BLOCK_J
    if TAIL_J < BLOCK_J:
        if pid_j == num_j - 1:
            _write_block(inputs, dw, scores, extent, start_j, TAIL_J, FORM, TERMS)
        else:
            _write_block(inputs, dw, scores, extent, start_j, BLOCK_J, FORM, TERMS)
    elif start_j < head.length:
        _write_block(inputs, dw, scores, extent, start_j, BLOCK_J, FORM, TERMS)
    if FORM.PACKED:
        sequences = tl.num_programs(0) // (nheads * num_j)
        lead, first, stop = jit.uncovered(call.cu_seqlens_ptr, head.batch, sequences, seqlen, total)
        tile.zero_rows(every, lead, first, stop, pid_j, num_j, BLOCK_J, FORM)


_MASKED_ROWS = 32  # rows per tile where masks cut, and with dropout: masks take registers that wider tiles do not leave
# The gradient of scores is rounded to the tokens' dtype. By a smaller scale, far below head_dim^-1/2, it would be
# subnormal in fp16, and multiplied by tokens that are large: fp16 is computed in fp32 then.
_LEAST_SCALE = 2**-8
_FEW = 16  # keys, of which one may have nearly all of an fp32 row's weight
_DELTA_ROWS = 32  # rows per program of delta.py, each of which is multiplied with all of them


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    given.backward(dout, dlse, w, out, lse, call)
    select = call.threshold is not None
    # The selection of phi="threshold" is piecewise constant: its scores get a gradient from lse alone.
    products = dout is not None and not select
    scores, selects = products or dlse is not None, dout is not None and select
    dtype = w.dtype
    wide = dtype == torch.float16 and scores and abs(call.scale) < _LEAST_SCALE
    if wide:
        dout, w, out = None if dout is None else dout.float(), w.float(), out.float()
    dw = operator.empty_out(w)
    if dw.numel() == 0:
        return dw.to(dtype)
    sizes = Launch(w, call)
    config = dict(tables.BACKWARD.config(w.device, sizes.head_dim, sizes.seqlen, call.causal, w.dtype))
    # One exponential is as exact as two in 16 bits only: without the subtraction, s is rounded as a power of two.
    derived = bool(config.pop("DERIVED")) and scores and w.dtype != torch.float32 and not (call.masked or select)
    block_j, block_i = config.pop("BLOCK_J"), config.pop("BLOCK_I")
    if call.seed is not None:
        block_i = min(block_i, _MASKED_ROWS)
    num_j, num_m = sizes.blocks(block_j), sizes.blocks(_DELTA_ROWS)
    g, lse = w if dout is None else dout, lse.contiguous()
    form = sizes.form(block_i, min(block_i if call.causal else sizes.tail(block_i), _MASKED_ROWS))
    shared = {
        "g": strided(g),
        "w": strided(w),
        "lse_ptr": lse,
        "factor_ptr": torch.empty_like(lse),
        "delta_ptr": torch.empty_like(lse),
        "extent_ptr": w.new_empty(sizes.heads, num_m, dtype=torch.float32),
        "num_m": num_m,
        **sizes.arguments(),
    }
    with launch.guard(w.device):
        if products or derived or selects:
            # All forms share a kernel, except those that walk over keys.
            exact = call.seed is not None or wide or (dtype == torch.float32 and sizes.seqlen <= _FEW)
            of_out = "out" if w.dtype == torch.float32 else "guarded"
            delta = "threshold" if selects else "" if not products else "weights" if exact else of_out
            walks = delta in ("threshold", "weights", "guarded")
            delta_form = (form if walks else form.unmasked)._replace(BLOCK=_DELTA_ROWS, TAIL=_DELTA_ROWS)
            launch.run(
                _mssa_bwd_delta_kernel,
                sizes.heads * num_m,
                **shared,
                out=strided(out),
                DELTA=delta,
                FORM=delta_form,
            )
        launch.run(
            _mssa_bwd_kernel,
            sizes.heads * num_j,
            **shared,
            dw=strided(dw),
            dlse_ptr=None if dlse is None else dlse.contiguous(),
            num_j=num_j,
            BLOCK_J=block_j,
            TAIL_J=sizes.tail(block_j),
            FORM=form,
            TERMS=Terms(dout is not None, scores, products, dlse is not None, selects, derived),
            **config,
        )
    return dw.to(dtype)
