"""One head of one sequence in the kernels of mssa: where its rows are, and how its products become weights."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from crate_kernels._triton import jit
from crate_kernels.ops.mssa.triton import tile
from crate_kernels.ops.mssa.triton.tile import TokenRows


class Options(NamedTuple):
    """The options of a call that are not compiled in.

    Triton specialises on the integers of a record, whatever ``do_not_specialize`` says: sizes, which vary from call to
    call, are arguments beside it.
    """

    cu_seqlens_ptr: Any
    mask_ptr: Any
    seed_ptr: Any
    qk_scale: Any  # magnitude of the scale, never 0
    scale: Any
    drop_last: Any
    keep_factor: Any  # 1 / (1 - dropout_p)
    threshold: Any


class KernelForm(NamedTuple):
    """The constants of a kernel that attends."""

    HEAD_DIM: int  # and the parts of a tile, as HeadDims
    FIRST: tuple[int, ...]
    WIDTHS: tuple[int, ...]
    PRECISION: str = "ieee"  # of products of fp32
    BLOCK: int = 0  # rows of a tile that a walk goes over
    TAIL: int = 0  # rows of such a tile where masks cut
    SOFTMAX: str = "online"  # or "bounded", or "threshold"
    CAUSAL: bool = False
    PADDED: bool = False  # a mask may cut any tile, or leave a row without keys
    PACKED: bool = False
    DROPOUT: bool = False
    NEGATIVE: bool = False  # the scale is below 0
    APART: bool = False  # rows and keys are two ranges of a sequence: rows may precede all keys, or follow them

    @property
    def unmasked(self) -> KernelForm:
        """The form without what depends on a query and its key: a kernel that all such calls share."""
        return self._replace(CAUSAL=False, PADDED=False, DROPOUT=False, NEGATIVE=False)


# The host takes as long to make one anew as to launch a kernel.
form_of = functools.lru_cache(maxsize=1024)(KernelForm)


class Head(NamedTuple):
    """The place of a head in the tensors of a call; all are int32, but ``row`` is int64."""

    number: tl.tensor  # batch * nheads + h
    batch: tl.tensor
    h: tl.tensor
    start: tl.tensor  # first row of a packed sequence, else 0
    length: tl.tensor
    row: tl.tensor  # of its first number in tensors of a number per row, as lse is


class Scores(NamedTuple):
    """What turns the products of a head into weights; places of queries and keys count from the first key."""

    length: tl.tensor  # number of keys
    call: Options
    head: int = 0  # number of the head, from which dropout draws
    mask_ptr: int = 0  # padding mask of the keys
    seed: int = 0
    first: int = 0  # place of the first key in the sequence, from which dropout draws


@triton.jit
def find_head(number, nheads, seqlen, total=0, cu_seqlens_ptr=None, PACKED: tl.constexpr = False):
    """Return the head of this number."""
    batch, h = number // nheads, number % nheads
    start, length = jit.sequence_bounds(cu_seqlens_ptr, batch, seqlen, total, PACKED)
    row = h.to(tl.int64) * total + start if PACKED else number.to(tl.int64) * seqlen
    return Head(number, batch, h, start, length, row)


@triton.jit
def tokens_of(head, tensor):
    """Return the tokens of a head in a tensor."""
    batch, h, start = head.batch.to(tl.int64), head.h.to(tl.int64), head.start.to(tl.int64)
    first = tensor.ptr + batch * tensor.stride_b + h * tensor.stride_h + start * tensor.stride_s
    return TokenRows(first, tensor.stride_s, tensor.stride_d)


@triton.jit
def scores_of(head, seqlen, call, FORM: tl.constexpr):
    """Return the scores of a head, with its own padding mask and the value of the seed."""
    mask_ptr = call.mask_ptr + head.batch.to(tl.int64) * seqlen if FORM.PADDED else 0
    seed = tl.load(call.seed_ptr) if FORM.DROPOUT else 0
    return Scores(head.length, call, head.number, mask_ptr, seed)


@triton.jit
def signed_products(a, b, FORM: tl.constexpr):
    """Return a b^T with the sign of the scale, for ``qk_scale`` to multiply."""
    s = tile.products(a, b, FORM)
    return -s if FORM.NEGATIVE else s


@triton.jit
def allowed(scores, queries, keys, FORM: tl.constexpr):
    """Return which queries may see which keys: positions that broadcast together."""
    seen = keys < scores.length
    if FORM.PADDED:
        seen = seen & (tl.load(scores.mask_ptr + keys, mask=seen, other=0) != 0)
    if FORM.CAUSAL:
        seen = seen & (keys <= queries)
    return seen


@triton.jit
def key_range(scores, start, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return (whole, stop) of the queries [start, start + ROWS): they see every key before whole, none from stop."""
    stop = tl.minimum(start + ROWS, scores.length) if FORM.CAUSAL else scores.length
    if FORM.APART:
        start, stop = tl.maximum(start, -1), tl.maximum(stop, 0)
    if FORM.PADDED:
        return 0, stop
    return (tl.minimum(start + 1, stop) if FORM.CAUSAL else stop) // FORM.BLOCK * FORM.BLOCK, stop


@triton.jit
def kept(scores, queries, keys):
    """Return which weights dropout keeps."""
    queries, keys = queries + scores.first, keys + scores.first
    return jit.keep_mask(scores.seed, scores.head, queries, keys, scores.call.drop_last)


@triton.jit
def largest(ptr, count, BY_TILE: tl.constexpr = False):
    """Return the largest of ``count`` numbers, none of which is negative.

    BY_TILE, each tile of numbers is reduced. Where a loop starts from a number that was reduced after another loop,
    Triton 3.7 forgets the alignment of the tokens that it loads, and loads 2 bytes at once.
    """
    found = 0.0 if BY_TILE else tl.zeros((64,), tl.float32)
    for start in range(0, count, 64):
        offs = start + tl.arange(0, 64)
        more = tl.load(ptr + offs, mask=offs < count, other=0.0)
        found = tl.maximum(found, tl.max(more, 0) if BY_TILE else more)
    return found if BY_TILE else tl.max(found, 0)
