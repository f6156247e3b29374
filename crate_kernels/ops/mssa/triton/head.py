"""One head of one sequence in the kernels of mssa: where its rows are, and how its products become weights."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.tile import Dims, Tokens


class Head(NamedTuple):
    """The place of a head in the tensors of a call; all are int32."""

    number: tl.tensor  # batch * nheads + h
    batch: tl.tensor
    h: tl.tensor
    start: tl.tensor  # first row of a packed sequence, else 0
    length: tl.tensor


class Scores(NamedTuple):
    """The numbers that turn the products of a head into weights."""

    length: tl.tensor
    qk_scale: tl.tensor  # magnitude of the scale
    mask_ptr: int = 0  # padding mask of the sequence
    head: int = 0  # number of the head, from which dropout draws
    seed: int = 0
    drop_last: int = 0
    keep_factor: float = 1.0  # 1 / (1 - dropout_p)
    scale: float = 0.0  # with its sign; the backward's
    threshold: float = 0.0


class Form(NamedTuple):
    """The constants of a kernel that attends."""

    DIMS: Dims
    PRECISION: str  # of products of fp32
    BLOCK: int  # rows of a tile that a walk goes over
    TAIL: int  # rows of such a tile where masks cut
    SOFTMAX: str = "online"  # or "bounded", or "threshold"
    CAUSAL: bool = False
    PADDED: bool = False
    DROPOUT: bool = False
    NEGATIVE: bool = False  # the scale is below 0


@triton.jit
def find_head(number, nheads, seqlen, total, cu_seqlens_ptr, PACKED: tl.constexpr):
    """Return the head of this number."""
    batch, h = number // nheads, number % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    return Head(number, batch, h, start, length)


@triton.jit
def tokens_of(head, ptr, stride_b, stride_h, stride_s, stride_d):
    """Return the tokens of a head in a tensor."""
    batch, h, start = head.batch.to(tl.int64), head.h.to(tl.int64), head.start.to(tl.int64)
    return Tokens(ptr + batch * stride_b + h * stride_h + start * stride_s, stride_s, stride_d)


@triton.jit
def offset_of(head, stride_b, stride_h):
    """Return the offset of a head in a tensor of a number per row."""
    return head.batch.to(tl.int64) * stride_b + head.h.to(tl.int64) * stride_h + head.start.to(tl.int64)


@triton.jit
def scores_of(
    head, seqlen, qk_scale, mask_ptr, seed_ptr, drop_last, keep_factor, FORM: tl.constexpr, scale=0.0, threshold=0.0
):
    """Return the scores of a head, with its own padding mask and the value of the seed."""
    mask_at = mask_ptr + head.batch.to(tl.int64) * seqlen if FORM.PADDED else 0  # Triton 3.6 cannot return None
    seed = tl.load(seed_ptr) if FORM.DROPOUT else 0
    return Scores(head.length, qk_scale, mask_at, head.number, seed, drop_last, keep_factor, scale, threshold)


@triton.jit
def signed_products(a, b, FORM: tl.constexpr):
    """Return a b^T with the sign of the scale, for ``qk_scale`` to multiply."""
    s = tile.products(a, b, FORM.PRECISION)
    return -s if FORM.NEGATIVE else s
