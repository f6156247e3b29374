"""Attention of one range of a sequence to another, by the loops of the forward and the backward.

``rows`` are the tokens whose results are written, ``columns`` those that they meet. Places of both count from the first
column, so that rows may be before it. The forward takes the online softmax: a row need not be its own key. The backward
adds up what the columns give to the rows, as keys and as queries of them: backward.py has the equations.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.mssa import call as whole
from crate_kernels.ops.mssa.rectangular import op_checks
from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall
from crate_kernels.ops.mssa.splits import cdiv
from crate_kernels.ops.mssa.triton import tables, tile
from crate_kernels.ops.mssa.triton.delta import _mssa_bwd_delta_kernel
from crate_kernels.ops.mssa.triton.head import Scores, find_head, largest, tokens_of
from crate_kernels.ops.mssa.triton.launch import HeadSizes, strided
from crate_kernels.ops.mssa.triton.raised import factor_of, norms_of
from crate_kernels.ops.mssa.triton.rows import empty_state, finish, walk_keys
from crate_kernels.ops.mssa.triton.terms import BackwardInputs, GradientTerms, load_block, walk


@triton.jit
def _scores_of_range(head, length, start, count, first_head, all_heads, mask_ptr, call, FORM: tl.constexpr):
    """Return the scores of ``count`` keys, the last at place ``length`` - 1; place 0 is at ``start`` in the sequence.

    Dropout draws from places in the sequence, and from the head's number among all heads.
    """
    mask_ptr = mask_ptr + head.batch.to(tl.int64) * count - (length - count) if FORM.PADDED else 0
    seed = tl.load(call.seed_ptr) if FORM.DROPOUT else 0
    return Scores(length, call, head.batch * all_heads + first_head + head.h, mask_ptr, seed, start)


@triton.jit
def _numbered_from(first, tokens):
    """Return tokens of which the first has the number ``first``."""
    return tile.TokenRows(tokens.ptr - first.to(tl.int64) * tokens.stride_s, tokens.stride_s, tokens.stride_d)


_SIZES = ["nheads", "rows", "columns", "offset", "start", "first_head", "all_heads"]


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=[*_SIZES, "num_m"])
def _mssa_rectangular_fwd_kernel(
    w, keys, out, lse_ptr, nheads, rows, columns, offset, start, first_head, all_heads, call, num_m,
    BLOCK_M: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write out and lse of BLOCK_M rows over the columns; the first row is at place ``offset``."""
    pid = tl.program_id(0)
    # Causal: begin with the rows that see most.
    pid_m = num_m - 1 - pid % num_m if FORM.CAUSAL else pid % num_m
    head = find_head(pid // num_m, nheads, rows)
    scores = _scores_of_range(head, columns, start, columns, first_head, all_heads, call.mask_ptr, call, FORM)
    # Number the rows of narrow heads by place: on sm_80 two numberings spill with 48 channels, and one with 104.
    first = offset if FORM.CAUSAL and FORM.HEAD_DIM <= 64 else offset * 0
    start_m = first + pid_m * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < first + rows
    w_m = tile.load(_numbered_from(first, tokens_of(head, w)), offs_m, mask_m, FORM)  # (BLOCK_M, HEAD_DIM)
    state = empty_state(BLOCK_M, FORM)
    state = walk_keys(state, w_m, tokens_of(head, keys), scores, start_m + (offset - first), "online", BLOCK_M, FORM)
    out, lse_ptr = _numbered_from(first, tokens_of(head, out)), lse_ptr + (head.row - first)
    finish(state, call.qk_scale, out, lse_ptr, offs_m, mask_m, call.keep_factor, FORM)


# Sizes vary per call: do not specialise on them.
@triton.jit(do_not_specialize=[*_SIZES, "num_j", "num_m", "row_num_m"])
def _mssa_rectangular_bwd_kernel(
    w, g, dw, lse_ptr, delta_ptr, dlse_ptr, row_mask_ptr,
    column_w, column_g, column_lse_ptr, factor_ptr, column_delta_ptr, column_dlse_ptr, extent_ptr,
    norms_ptr, row_norms_ptr, row_num_m,
    nheads, rows, columns, offset, start, first_head, all_heads, call, num_j, num_m,
    BLOCK_J: tl.constexpr, FORM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write what the columns add to the gradient of BLOCK_J rows; the first row is at place ``offset``."""
    pid = tl.program_id(0)
    start_j = pid % num_j * BLOCK_J
    head = find_head(pid // num_j, nheads, rows)
    at = head.row
    dlse_at = dlse_ptr + at if TERMS.HAS_DLSE else lse_ptr
    own = BackwardInputs(
        tokens_of(head, w), tokens_of(head, g), lse_ptr + at, lse_ptr + at, delta_ptr + at, dlse_at, 1.0
    )
    end = offset + rows
    scores = _scores_of_range(head, end, start, rows, first_head, all_heads, row_mask_ptr, call, FORM)
    own = load_block(own, scores, start_j, rows, BLOCK_J, FORM, TERMS, offset)

    at = find_head(pid // num_j, nheads, columns).row
    w, g = tokens_of(head, column_w), tokens_of(head, column_g)
    dlse_at = column_dlse_ptr + at if TERMS.HAS_DLSE else column_lse_ptr
    raised = 1.0
    if TERMS.RAISED:
        heads, number = tl.num_programs(0) // num_j, head.number.to(tl.int64)
        of_g, of_w = norms_of(row_norms_ptr + number * row_num_m, heads * row_num_m, row_num_m)
        more_g, more_w = norms_of(norms_ptr + number * num_m, heads * num_m, num_m)
        raised = factor_of(tl.maximum(of_g, more_g), tl.maximum(of_w, more_w), call, FORM)
    inputs = BackwardInputs(w, g, column_lse_ptr + at, factor_ptr + at, column_delta_ptr + at, dlse_at, raised)
    scores = _scores_of_range(head, columns, start, columns, first_head, all_heads, call.mask_ptr, call, FORM)
    extent = 0.0
    if TERMS.DERIVED:
        # A row's L need not be small: at least 0, as it sees itself; scores are small enough if columns' L are.
        extent = largest(extent_ptr + head.number.to(tl.int64) * num_m, num_m, BY_TILE=True)
    acc = tile.zeros(BLOCK_J, FORM)  # (BLOCK_J, HEAD_DIM)
    acc = walk(acc, own, inputs, scores, extent, offset + start_j, BLOCK_J, FORM, TERMS)
    if TERMS.RAISED:
        acc = tile.scale(acc, tl.zeros((BLOCK_J,), tl.float32) + 1.0 / raised)
    offs_j = start_j + tl.arange(0, BLOCK_J)
    tile.store(tokens_of(head, dw), acc, offs_j, offs_j < rows, FORM)


def _sizes(columns: Tensor, mask: Tensor | None, call: RectangularCall, causal: bool) -> HeadSizes:
    """Return the sizes of a call whose sequences are the columns."""
    options = whole.MSSACall(mask, seed=call.seed, causal=causal, scale=call.scale, dropout_p=call.dropout_p)
    return HeadSizes(columns, options)


def _arguments(sizes: HeadSizes, rows: Tensor, call: RectangularCall) -> dict[str, Any]:
    """Return what both kernels take: the sizes and the call."""
    return {
        "nheads": sizes.nheads,
        "rows": rows.shape[2],
        "columns": sizes.seqlen,
        "offset": call.row_start - call.column_start,
        "start": call.column_start,
        "first_head": call.first_head,
        "all_heads": call.nheads or sizes.nheads,
        "call": sizes.arguments()["call"],
    }


_MASKED_KEYS = 64  # keys per tile where masks cut: they take registers that wider tiles do not leave


def forward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` of the rows over these columns alone, in fp32."""
    op_checks.forward(rows, columns, call)
    w, mask = rows.w, columns.key_padding_mask
    out = w.new_empty(w.shape, dtype=torch.float32)
    lse = w.new_empty(w.shape[:3], dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    causal = call.causal and rows.start < columns.stop - 1
    sizes = _sizes(columns.w, None if mask is None else mask.contiguous(), call, causal)
    config = dict(tables.FORWARD.config(w.device, sizes.head_dim, sizes.seqlen, causal, w.dtype))
    del config["BOUNDED"]
    block_n = config.pop("BLOCK_N")
    tail_n = min(block_n if causal else sizes.tail(block_n), _MASKED_KEYS)
    num_m = cdiv(w.shape[2], config["BLOCK_M"])
    with launch.guard(w.device):
        launch.run(
            _mssa_rectangular_fwd_kernel,
            sizes.heads * num_m,
            **_arguments(sizes, w, call),
            w=strided(w),
            keys=strided(columns.w),
            out=strided(out),
            lse_ptr=lse,
            num_m=num_m,
            FORM=sizes.form(block_n, tail_n)._replace(APART=True),
            **config,
        )
    return out, lse


def _mask(tokens: RangeTokens) -> Tensor:
    """Return which tokens are kept as keys."""
    mask = tokens.key_padding_mask
    if mask is None:
        return tokens.w.new_ones(tokens.w.shape[0], tokens.w.shape[2], dtype=torch.bool)
    return mask.contiguous()


_DELTA_ROWS = 32  # rows per program of delta.py


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return the product of each row of ``dout`` with the same row of ``out``, as the backward's are summed."""
    op_checks.delta(dout, out)
    delta = dout.new_empty(dout.shape[:3], dtype=torch.float32)
    if delta.numel() == 0:
        return delta
    sizes = HeadSizes(dout, whole.MSSACall())
    num_m = sizes.blocks(_DELTA_ROWS)
    with launch.guard(dout.device):
        launch.run(
            _mssa_bwd_delta_kernel,
            sizes.heads * num_m,
            g=strided(dout),
            out=strided(out),
            w=strided(dout),  # not read
            lse_ptr=None,
            factor_ptr=None,
            delta_ptr=delta,
            extent_ptr=None,
            norms_ptr=None,
            dlse_ptr=None,
            num_m=num_m,
            **sizes.arguments(),
            DELTA="out",
            FORM=sizes.form(_DELTA_ROWS, _DELTA_ROWS),
        )
    return delta


_MASKED_ROWS = 32  # rows per tile where masks cut, and with dropout


def _note(tokens: RangeTokens, shift: Tensor, lse: Tensor | None, raised: bool) -> dict[str, Any]:
    """Return what one launch finds of the tokens of a range, as arguments of a backward.

    Of ``lse``, unless None: exp(-lse), and the largest |lse| of blocks. ``raised``: largest norms of blocks, in which
    ``shift``, what is subtracted from the products of gradients, counts as a gradient of lse does.
    """
    sizes = HeadSizes(tokens.w, whole.MSSACall())
    num_m, w = sizes.blocks(_DELTA_ROWS), strided(tokens.w)
    found = {
        "factor_ptr": shift if lse is None else torch.empty_like(lse),
        "extent_ptr": shift if lse is None else shift.new_empty(sizes.heads, num_m),
        "norms_ptr": shift.new_empty(2, sizes.heads, num_m) if raised else None,
        "num_m": num_m,
    }
    if raised or lse is not None:
        launch.run(
            _mssa_bwd_delta_kernel,
            sizes.heads * num_m,
            g=w if tokens.dout is None else strided(tokens.dout),
            out=w,  # not read
            w=w,
            lse_ptr=lse,
            delta_ptr=shift,  # not written
            dlse_ptr=shift if raised else None,
            **found,
            **sizes.arguments(),
            DELTA="passed" if raised else "",
            FORM=sizes.form(_DELTA_ROWS, _DELTA_ROWS),
        )
    return found


def backward(rows: RangeTokens, columns: RangeTokens, call: RectangularCall) -> Tensor:
    """Return what the columns, as keys and as queries, add to the gradient of the rows, in fp32."""
    op_checks.backward(rows, columns, call)
    w, (dout, lse, delta, dlse) = rows.w, rows.gradients()
    column_dout, column_lse, column_delta, column_dlse = columns.gradients()
    # In 16 bits the rounding of delta - dlse is nothing, and one number in place of two saves registers.
    apart = w.dtype == torch.float32
    if not apart:
        delta, column_delta = delta - dlse, column_delta - column_dlse
    dw = w.new_empty(w.shape, dtype=torch.float32)
    if dw.numel() == 0:
        return dw
    padded = rows.key_padding_mask is not None or columns.key_padding_mask is not None
    sizes = _sizes(columns.w, _mask(columns) if padded else None, call, call.causal)
    config = dict(tables.BACKWARD.config(w.device, sizes.head_dim, sizes.seqlen, call.causal, w.dtype))
    # One exponential is as exact as two in 16 bits only: without the subtraction, s is rounded as a power of two.
    chosen, raised = config.pop("DERIVED"), w.dtype == torch.float16
    derived = chosen > 0 and w.dtype != torch.float32 and call.scale > 0 and not sizes.call.masked
    if chosen > 1:
        config.pop("maxnreg", None)  # chosen for the symmetric form
    block_i = config.pop("BLOCK_I")
    if call.seed is not None:
        block_i = min(block_i, _MASKED_ROWS)
    num_j = cdiv(w.shape[2], config["BLOCK_J"])
    form = sizes.form(block_i, min(block_i if call.causal else sizes.tail(block_i), _MASKED_ROWS))
    delta, column_delta, column_lse = delta.contiguous(), column_delta.contiguous(), column_lse.contiguous()
    with launch.guard(w.device):
        noted = _note(rows, delta, None, raised)
        launch.run(
            _mssa_rectangular_bwd_kernel,
            sizes.heads * num_j,
            **_arguments(sizes, w, call),
            w=strided(w),
            g=strided(dout),
            dw=strided(dw),
            lse_ptr=lse.contiguous(),
            delta_ptr=delta,
            dlse_ptr=dlse.contiguous() if apart else None,
            row_mask_ptr=_mask(rows) if padded else None,
            row_norms_ptr=noted["norms_ptr"],
            row_num_m=noted["num_m"],
            column_w=strided(columns.w),
            column_g=strided(column_dout),
            column_lse_ptr=column_lse,
            column_delta_ptr=column_delta,
            column_dlse_ptr=column_dlse.contiguous() if apart else None,
            **_note(columns, column_delta, column_lse if derived else None, raised),
            num_j=num_j,
            FORM=form._replace(APART=True),
            TERMS=GradientTerms(
                VALUES=True, SCORES=True, PRODUCTS=True, HAS_DLSE=apart, DERIVED=derived, RAISED=raised
            ),
            **config,
        )
    return dw
