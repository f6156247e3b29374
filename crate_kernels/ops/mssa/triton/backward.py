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
from crate_kernels.ops.mssa import op_checks
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.splits import cdiv
from crate_kernels.ops.mssa.triton import symmetric, tables, tile
from crate_kernels.ops.mssa.triton.delta import _mssa_bwd_delta_kernel
from crate_kernels.ops.mssa.triton.divided import _mssa_bwd_divide_kernel, raised_shift
from crate_kernels.ops.mssa.triton.head import find_head, largest, scores_of, tokens_of
from crate_kernels.ops.mssa.triton.launch import HeadSizes, strided
from crate_kernels.ops.mssa.triton.raised import factor_of, norms_of
from crate_kernels.ops.mssa.triton.terms import BackwardInputs, GradientTerms, load_block, walk


@triton.jit
def _write_block(inputs, dw, scores, extent, start_j, BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr):
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head."""
    own = load_block(inputs, scores, start_j, scores.length, BLOCK_J, FORM, TERMS)
    acc = tile.zeros(BLOCK_J, FORM)  # (BLOCK_J, HEAD_DIM)
    if TERMS.SELECT:
        # Add up selected values first: the threshold is exact as a factor of the sum, and rounded as a weight.
        SELECTED: tl.constexpr = GradientTerms(VALUES=True, SELECT=True)
        acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, SELECTED)
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + scores.call.threshold)
        if TERMS.SCORES:
            REST: tl.constexpr = GradientTerms(SCORES=True, HAS_DLSE=True)
            acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, REST)
    else:
        acc = walk(acc, own, inputs, scores, extent, start_j, BLOCK_J, FORM, TERMS)
    if TERMS.RAISED:
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + 1.0 / inputs.raised)
    offs_j = start_j + tl.arange(0, BLOCK_J)
    tile.store(dw, acc, offs_j, offs_j < scores.length, FORM)


@triton.jit
def _write_divided(
    inputs, dw, scores, shift, start_j, BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head from divided gradients."""
    own = load_block(inputs, scores, start_j, scores.length, BLOCK_J, FORM, TERMS)
    acc = tile.zeros(BLOCK_J, FORM)  # (BLOCK_J, HEAD_DIM)
    acc = symmetric.walk(acc, own, inputs, scores, shift, start_j, BLOCK_J, FORM)
    if TERMS.RAISED:
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + 1.0 / inputs.raised)
    offs_j = start_j + tl.arange(0, BLOCK_J)
    tile.store(dw, acc, offs_j, offs_j < scores.length, FORM)


# Rows of a head that the symmetric form leaves, at a time: so few take other products than its own do on sm_90, whose
# assembler would serialise all of them otherwise.
_LEFT_ROWS = tl.constexpr(16)


@triton.jit
def _write_symmetric(
    inputs, left, dw, scores, shift, extent, start_j, last, BLOCK_J: tl.constexpr, TAIL_J: tl.constexpr,
    FORM: tl.constexpr, LEFT_FORM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows [start_j, start_j + BLOCK_J) of a head, TAIL_J if they are the last.

    A head that the symmetric form leaves has the inputs ``left``. In fp16, where there may be many, it comes in whole
    blocks.
    """
    ROWS: tl.constexpr = BLOCK_J if BLOCK_J < _LEFT_ROWS else _LEFT_ROWS
    LEFT: tl.constexpr = GradientTerms(
        VALUES=True, SCORES=True, PRODUCTS=True, HAS_DLSE=TERMS.HAS_DLSE, DERIVED=TERMS.DERIVED, RAISED=True
    )
    if TERMS.RAISED and shift == -float("inf"):
        _write_block(left, dw, scores, extent, start_j, BLOCK_J, LEFT_FORM, LEFT)
    elif shift == -float("inf"):
        for start in range(start_j, tl.minimum(start_j + BLOCK_J, scores.length), ROWS):
            _write_block(left, dw, scores, extent, start, ROWS, FORM, TERMS)
    elif TAIL_J < BLOCK_J:
        if last:
            _write_divided(inputs, dw, scores, shift, start_j, TAIL_J, FORM, TERMS)
        else:
            _write_divided(inputs, dw, scores, shift, start_j, BLOCK_J, FORM, TERMS)
    else:
        _write_divided(inputs, dw, scores, shift, start_j, BLOCK_J, FORM, TERMS)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=["nheads", "seqlen", "total", "num_j", "num_m"])
def _mssa_bwd_kernel(
    g, w, dw, lse_ptr, factor_ptr, delta_ptr, dlse_ptr, extent_ptr, norms_ptr, divided_ptr, divided_delta_ptr,
    nheads, seqlen, total, call, num_j, num_m,
    BLOCK_J: tl.constexpr, TAIL_J: tl.constexpr,
    FORM: tl.constexpr, LEFT_FORM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows; the last block of a sequence has TAIL_J rows, the last tile TAIL_I.

    In the symmetric form g and delta are divided; in fp16 they are of the heads that it leaves.
    """
    tl.static_assert(BLOCK_J % FORM.BLOCK == 0)  # tiles after the diagonal start where it ends
    pid = tl.program_id(0)
    pid_j = pid % num_j
    head = find_head(pid // num_j, nheads, seqlen, total, call.cu_seqlens_ptr, FORM.PACKED)
    every = tile.TokenRows(dw.ptr + head.h.to(tl.int64) * dw.stride_h, dw.stride_s, dw.stride_d)
    w, dw = tokens_of(head, w), tokens_of(head, dw)
    g = tokens_of(head, g) if TERMS.VALUES else w
    dlse_at = dlse_ptr + head.row if TERMS.HAS_DLSE else lse_ptr
    at = head.row
    scores = scores_of(head, seqlen, call, FORM)
    raised = 1.0
    if TERMS.RAISED and not TERMS.SYMMETRIC:
        blocks = tl.num_programs(0) // num_j * num_m
        of_g, of_w = norms_of(norms_ptr + head.number.to(tl.int64) * num_m, blocks, num_m)
        raised = factor_of(of_g, of_w, call, FORM)
    inputs = BackwardInputs(w, g, lse_ptr + at, factor_ptr + at, delta_ptr + at, dlse_at, raised)
    extent = 0.0
    if TERMS.DERIVED and not TERMS.SYMMETRIC:
        extent = largest(extent_ptr + head.number.to(tl.int64) * num_m, num_m)
    start_j = pid_j * BLOCK_J
    if TERMS.SYMMETRIC:
        if start_j < head.length:
            left = inputs
            if TERMS.RAISED:
                blocks = tl.num_programs(0) // num_j * num_m
                found = raised_shift(extent_ptr, norms_ptr, head, blocks, num_m, call, FORM)
                shift, raised, extent = found.shift, found.raised, found.extent
                left = BackwardInputs(w, g, lse_ptr + at, factor_ptr + at, delta_ptr + at, dlse_at, found.raised_left)
                # With constant strides, as many registers are left as it needs.
                h = tile.TokenRows(divided_ptr + at * FORM.HEAD_DIM, FORM.HEAD_DIM, 1)
                inputs = BackwardInputs(w, h, lse_ptr, lse_ptr, divided_delta_ptr + at, lse_ptr, raised)
            else:
                shift = tl.load(extent_ptr + head.number)
            last = pid_j == num_j - 1
            _write_symmetric(
                inputs, left, dw, scores, shift, extent, start_j, last, BLOCK_J, TAIL_J, FORM, LEFT_FORM, TERMS
            )
    elif TAIL_J < BLOCK_J:
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
_MIN_SCALE = 2**-8
_FEW = 16  # keys, of which one may have nearly all of an fp32 row's weight
_DELTA_ROWS = 32  # rows per block of delta.py, each of which is multiplied with all of them
_WIDE_DELTA_ROWS = 16  # of fp32 rows, whose products take the registers
_WIDEST_GUARDED = 128  # channels of fp32 rows, beyond which two products more would spill
_WIDEST_DROPPED = 96  # channels of fp16 rows, beyond which dropout in both forms of a kernel would spill
_DIVIDE_REGISTERS = 168  # of fp16, up to 128 channels: left alone, the assembler spills for fewer with some options
_MAX_ROWS = 2048  # rows of a sequence for each of which one block is a program's, which reads L of the whole sequence


def _by_head(tokens: Tensor) -> Tensor:
    """Allocate a tensor of the same shape in which a head's tokens follow each other."""
    if tokens.dim() == 4:
        return tokens.new_empty(tokens.shape)
    total, nheads, head_dim = tokens.shape
    return tokens.new_empty(nheads, total, head_dim).transpose(0, 1)


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    op_checks.backward(dout, dlse, w, out, lse, call)
    select = call.threshold is not None
    # The selection of phi="threshold" is piecewise constant: its scores get a gradient from lse alone.
    products = dout is not None and not select
    scores, selects = products or dlse is not None, dout is not None and select
    dtype = w.dtype
    wide = dtype == torch.float16 and scores and abs(call.scale) < _MIN_SCALE
    if wide:
        dout, w, out = None if dout is None else dout.float(), w.float(), out.float()
    dw = operator.empty_out(w)
    if dw.numel() == 0:
        return dw.to(dtype)
    sizes = HeadSizes(w, call)
    config = dict(tables.BACKWARD.config(w.device, sizes.head_dim, sizes.seqlen, call.causal, w.dtype))
    # One exponential is as exact as two in 16 bits only: without the subtraction, s is rounded as a power of two.
    chosen = config.pop("DERIVED")
    level = chosen if w.dtype != torch.float32 and not select else 0
    raised = w.dtype == torch.float16 and scores and not selects
    symmetric_form = level >= (3 if call.causal else 2) and products
    if raised:  # other widths are padded, by masks that would spill
        widest = sizes.head_dim if call.seed is None else _WIDEST_DROPPED
        symmetric_form = symmetric_form and sizes.head_dim % 16 == 0 and sizes.head_dim <= widest
    derived = level > 0 and scores and not (call.masked or (symmetric_form and not raised))
    if chosen > 1 and not (symmetric_form and call.seed is None and not (call.masked or call.packed)):
        config.pop("maxnreg", None)  # chosen for the symmetric form of whole tiles: others would spill
    block_j, block_i = config.pop("BLOCK_J"), config.pop("BLOCK_I")
    if call.seed is not None:
        block_i = min(block_i, _MASKED_ROWS)
    num_j = sizes.blocks(block_j)
    each = cdiv(sizes.seqlen, _MAX_ROWS) if symmetric_form else 1
    delta_rows = _WIDE_DELTA_ROWS if w.dtype == torch.float32 and sizes.head_dim > 64 else _DELTA_ROWS
    num_m = sizes.blocks(delta_rows * each)
    g, lse = w if dout is None else dout, lse.contiguous()
    form = sizes.form(block_i, min(block_i if call.causal else sizes.tail(block_i), _MASKED_ROWS))
    # All forms share a kernel, except those that walk over keys.
    exact = call.seed is not None or wide or (dtype == torch.float32 and sizes.seqlen <= _FEW)
    of_out = "out" if w.dtype == torch.float32 and sizes.head_dim > _WIDEST_GUARDED else "guarded"
    delta = "threshold" if selects else "" if not products else "weights" if exact else of_out
    walks = delta in ("threshold", "weights", "guarded")
    delta_form = (form if walks else form.unmasked)._replace(BLOCK=delta_rows, TAIL=delta_rows)
    numbers = {"lse_ptr": lse, "delta_ptr": torch.empty_like(lse), "num_m": num_m, **sizes.arguments()}
    shared = {**numbers, "g": strided(g), "w": strided(w), "factor_ptr": lse, "norms_ptr": None}
    divided = divided_delta = left_form = None
    dlse = None if dlse is None else dlse.contiguous()
    with launch.guard(w.device):
        if symmetric_form:
            divided, divided_delta = _by_head(g), torch.empty_like(lse) if raised else numbers["delta_ptr"]
            shared["extent_ptr"] = w.new_empty(3 if raised else 1, sizes.heads, dtype=torch.float32)
            if raised:
                # Wide tiles of the other form would cost up to 64 channels a program a multiprocessor.
                full = sizes.head_dim > 64 and not call.packed
                left_form = form if full else form._replace(BLOCK=min(block_i, _MASKED_ROWS))
                shared["factor_ptr"] = torch.empty_like(lse)
                shared["norms_ptr"] = w.new_empty(3, sizes.heads, num_m, dtype=torch.float32)
            bounded = raised and sizes.head_dim <= 128 and launch.arch(w.device).startswith("sm_")
            launch.run(
                _mssa_bwd_divide_kernel,
                sizes.heads * num_m,
                **{**numbers, "delta_ptr": divided_delta},
                g=strided(g),
                divided=strided(divided),
                out=strided(out),
                w=strided(w),
                dlse_ptr=dlse,
                shift_ptr=shared["extent_ptr"],
                left_delta_ptr=numbers["delta_ptr"] if raised else None,
                factor_ptr=shared["factor_ptr"] if raised else None,
                norms_ptr=shared["norms_ptr"],
                each=each,
                DELTA=delta,
                HAS_DLSE=dlse is not None,
                num_stages=1,
                **({"maxnreg": _DIVIDE_REGISTERS} if bounded else {}),
                FORM=delta_form,
            )
            if not raised:
                shared["g"], divided, divided_delta, dlse = strided(divided), None, None, None  # dlse is in delta
        else:
            shared["factor_ptr"] = torch.empty_like(lse)
            shared["extent_ptr"] = w.new_empty(sizes.heads, num_m, dtype=torch.float32)
            if raised:
                shared["norms_ptr"] = w.new_empty(2, sizes.heads, num_m, dtype=torch.float32)
            if products or derived or selects or raised:
                launch.run(
                    _mssa_bwd_delta_kernel,
                    sizes.heads * num_m,
                    **shared,
                    out=strided(out),
                    dlse_ptr=dlse if raised else None,
                    DELTA=delta,
                    FORM=delta_form,
                )
        launch.run(
            _mssa_bwd_kernel,
            sizes.heads * num_j,
            **shared,
            dw=strided(dw),
            dlse_ptr=dlse,
            divided_ptr=divided,
            divided_delta_ptr=divided_delta,
            num_j=num_j,
            BLOCK_J=block_j,
            TAIL_J=sizes.tail(block_j),
            FORM=form,
            LEFT_FORM=left_form,
            TERMS=GradientTerms(
                dout is not None, scores, products, dlse is not None, selects, derived, symmetric_form, raised
            ),
            **config,
        )
    return dw.to(dtype)
