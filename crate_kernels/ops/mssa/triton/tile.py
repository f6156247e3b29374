"""Tiles of tokens, and what the kernels of mssa do with them.

A tile is (rows, head_dim). Triton's widths are powers of two, and a head_dim of 48 would cost as much as 64. A tile is
therefore a tuple of up to four parts, 48 = 32 + 16, and a product over channels is a sum over parts. A matrix product
needs parts of at least 16 channels.

Triton's compiler keeps a record constant only where it is assigned as ``tl.constexpr``: records of constants (HeadDims,
KernelForm, GradientTerms) are apart from records of tensors (TokenRows, Head, Scores, ...). Its cache of compiled
kernels is keyed by the records that a kernel takes, not by those that it makes: do not change the default of a field.

Of a record that a kernel takes as a constant, Triton 3.6 passes on numbers only: pass the record, not its other fields.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl


class TokenRows(NamedTuple):
    """The tokens of one head: a pointer to the first, and the strides of tokens and of channels."""

    ptr: tl.tensor
    stride_s: tl.tensor
    stride_d: tl.tensor


class HeadDims(NamedTuple):
    """The channels of a head, and the first channel and the width of each part of a tile."""

    HEAD_DIM: int
    FIRST: tuple[int, ...]
    WIDTHS: tuple[int, ...]


@functools.cache
def split_dims(head_dim: int, widest: int = 256) -> HeadDims:
    """Split head_dim, padded to a multiple of 16 (of 32 above 128), into powers of two up to ``widest``.

    Three at most with the default: 240 would need four, hence the coarser padding of wide heads; 256 is one part.
    """
    step = 16 if head_dim <= 128 else 32
    left = max(-(-head_dim // step) * step, 16)
    first: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    while left:
        first += (sum(widths),)
        widths += (min(1 << (left.bit_length() - 1), widest),)
        left -= widths[-1]
    return HeadDims(head_dim, first, widths)


@triton.jit
def _pointers(tokens, rows, k: tl.constexpr, DIMS: tl.constexpr):
    """Return the pointers of part ``k`` of a tile."""
    tl.static_assert(DIMS.WIDTHS[k] >= 16)
    channels = DIMS.FIRST[k] + tl.arange(0, DIMS.WIDTHS[k])
    offsets = rows.to(tl.int64)[:, None] * tokens.stride_s + channels.to(tl.int64)[None, :] * tokens.stride_d
    return tokens.ptr + offsets  # (rows, WIDTH)


@triton.jit
def _real(k: tl.constexpr, DIMS: tl.constexpr):
    """Return which channels of part ``k`` exist, (1, WIDTH)."""
    return (DIMS.FIRST[k] + tl.arange(0, DIMS.WIDTHS[k]) < DIMS.HEAD_DIM)[None, :]


@triton.jit
def _inside(mask, k: tl.constexpr, DIMS: tl.constexpr):
    """Return which numbers of part ``k`` exist: (rows, WIDTH), or (rows, 1) where all of its channels do."""
    if DIMS.FIRST[k] + DIMS.WIDTHS[k] > DIMS.HEAD_DIM:
        return mask[:, None] & _real(k, DIMS)
    else:
        return mask[:, None]


@triton.jit
def load(tokens, rows, mask, DIMS: tl.constexpr):
    """Load a tile; rows outside ``mask`` and channels beyond head_dim are 0."""
    tile = ()
    for k in tl.static_range(len(DIMS.WIDTHS)):
        inside = _inside(mask, k, DIMS)
        tile += (tl.load(_pointers(tokens, rows, k, DIMS), mask=inside, other=0.0),)
    return tile


@triton.jit
def load_whole(tokens, rows, DIMS: tl.constexpr):
    """Load a tile all of whose rows exist: copies without predicates."""
    tile = ()
    for k in tl.static_range(len(DIMS.WIDTHS)):
        at = _pointers(tokens, rows, k, DIMS)
        if DIMS.FIRST[k] + DIMS.WIDTHS[k] > DIMS.HEAD_DIM:
            tile += (tl.load(at, mask=_real(k, DIMS), other=0.0),)
        else:
            tile += (tl.load(at),)
    return tile


@triton.jit
def store(tokens, tile, rows, mask, DIMS: tl.constexpr):
    """Store a tile in the dtype of the pointer; rows outside ``mask`` are left alone."""
    for k in tl.static_range(len(tile)):
        inside = _inside(mask, k, DIMS)
        tl.store(_pointers(tokens, rows, k, DIMS), tile[k].to(tokens.ptr.dtype.element_ty), mask=inside)


@triton.jit
def zeros(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return a tile of fp32 zeros: an accumulator."""
    tile = ()
    for k in tl.static_range(len(DIMS.WIDTHS)):
        tile += (tl.full((ROWS, DIMS.WIDTHS[k]), 0.0, tl.float32),)
    return tile


@triton.jit
def scale(tile, factor):
    """Return a tile with each row times ``factor`` (rows,)."""
    scaled = ()
    for k in tl.static_range(len(tile)):
        scaled += (tile[k] * factor[:, None],)
    return scaled


@triton.jit
def rounded(tile, dtype: tl.constexpr):
    """Return a tile in a dtype."""
    converted = ()
    for k in tl.static_range(len(tile)):
        converted += (tile[k].to(dtype),)
    return converted


@triton.jit
def up_to(tile, limit: tl.constexpr):
    """Return a tile with 0 in place of numbers whose magnitude is beyond ``limit``."""
    kept = ()
    for k in tl.static_range(len(tile)):
        kept += (tl.where(tl.abs(tile[k]) > limit, 0.0, tile[k]),)
    return kept


@triton.jit
def add(a, b):
    """Return the sum of two tiles."""
    total = ()
    for k in tl.static_range(len(a)):
        total += (a[k] + b[k],)
    return total


@triton.jit
def sum_groups(tile, GROUPS: tl.constexpr):
    """Return the sum of as many groups of consecutive rows as there are; a group has the rows of the result."""
    total = ()
    for k in tl.static_range(len(tile)):
        parts = tile[k].reshape(GROUPS, tile[k].shape[0] // GROUPS, tile[k].shape[1])
        total += (tl.sum(parts, 0),)
    return total


@triton.jit
def products(a, b, FORM: tl.constexpr):
    """Return a b^T in fp32, the product of every row of ``a`` with every row of ``b``."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=FORM.PRECISION)
    for k in tl.static_range(1, len(a)):
        s = tl.dot(a[k], tl.trans(b[k]), s, input_precision=FORM.PRECISION)
    return s  # (rows of a, rows of b)


@triton.jit
def add_products(s, a, b, FORM: tl.constexpr):
    """Return s + a b^T, as ``products``."""
    for k in tl.static_range(len(a)):
        s = tl.dot(a[k], tl.trans(b[k]), s, input_precision=FORM.PRECISION)
    return s  # (rows of a, rows of b)


@triton.jit
def add_product(acc, p, b, FORM: tl.constexpr, APART: tl.constexpr = False):
    """Return acc + p b, with ``p`` (rows of acc, rows of b) in the dtype of ``b``.

    APART, fp32 products of a tile are summed by themselves first, where registers are left: in one chain over all
    tiles, the roundings of 10,000 tokens add up. Triton makes a chain of a product and a sum, not of a multiply-add.
    """
    total = ()
    for k in tl.static_range(len(b)):
        if APART and p.dtype == tl.float32 and FORM.HEAD_DIM <= 128:
            total += (tl.fma(tl.dot(p, b[k], input_precision=FORM.PRECISION), 1.0, acc[k]),)
        else:
            total += (tl.dot(p, b[k], acc[k], input_precision=FORM.PRECISION),)
    return total


@triton.jit
def row_products(a, b):
    """Return the product of each row of ``a`` with the same row of ``b``, in fp32."""
    s = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for k in tl.static_range(1, len(a)):
        s += tl.sum(a[k].to(tl.float32) * b[k].to(tl.float32), 1)
    return s  # (rows,)


@triton.jit
def row_squares(a, b):
    """Return the sum of the squares of a's numbers times b's, of each row, in fp32."""
    s = tl.zeros((a[0].shape[0],), tl.float32)
    for k in tl.static_range(len(a)):
        product = a[k].to(tl.float32) * b[k].to(tl.float32)
        s += tl.sum(product * product, 1)
    return s  # (rows,)


@triton.jit
def row_largest(a):
    """Return the largest magnitude of each row, in fp32."""
    row_max = tl.zeros((a[0].shape[0],), tl.float32)
    for k in tl.static_range(len(a)):
        row_max = tl.maximum(row_max, tl.max(tl.abs(a[k].to(tl.float32)), 1))
    return row_max  # (rows,)


@triton.jit
def zero_rows(tokens, lead, first, stop, pid, step, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Zero rows [0, lead) and [first, stop): of their blocks of ROWS, ``pid``, ``pid + step``, ..."""
    for start in range(tl.where(lead > 0, 0, first) + pid * ROWS, stop, step * ROWS):
        rows = start + tl.arange(0, ROWS)
        outside = (rows < stop) & ((rows < lead) | (rows >= first))
        store(tokens, zeros(ROWS, DIMS), rows, outside, DIMS)


@triton.jit
def zero_numbers(ptr, lead, first, stop, pid, step, ROWS: tl.constexpr):
    """Zero the numbers of rows [0, lead) and [first, stop), as ``zero_rows`` does the rows."""
    for start in range(tl.where(lead > 0, 0, first) + pid * ROWS, stop, step * ROWS):
        rows = start + tl.arange(0, ROWS)
        outside = (rows < stop) & ((rows < lead) | (rows >= first))
        tl.store(ptr + rows, tl.zeros((ROWS,), tl.float32), mask=outside)
