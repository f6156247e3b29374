"""Tiles of tokens in Triton: what the forward, the backward and the decoding kernels of mssa do with them.

A tile is (rows, head_dim). Triton's widths are powers of two, so that head_dim 48 would cost what 64 costs; a tile
is therefore a tuple of up to three parts of D0, D1 and D2 channels, 48 = 32 + 16, and a product over channels is a
sum over parts. No part is narrower than 16, which is what a matrix product needs.

In the kernels ``at`` is (pointer to a head's first row, stride of rows, stride of channels) and ``DIMS`` is
(head_dim, D0, D1, D2).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

import triton
import triton.language as tl


def parts(head_dim: int) -> tuple[int, int, int]:
    """Split head_dim, padded to a multiple of 16 (of 32 above 128), into at most three powers of two.

    240 would need four, hence the coarser padding of wide heads; 256 is one part.
    """
    step = 16 if head_dim <= 128 else 32
    left = max(-(-head_dim // step) * step, 16)
    widths = []
    while left:
        widths.append(1 << (left.bit_length() - 1))
        left -= widths[-1]
    first, second, third = (*widths, 0, 0)[:3]
    return first, second, third


@triton.jit
def _offsets(at, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Return the int64 offsets of channels [FIRST, FIRST + WIDTH) of some rows."""
    tl.static_assert(WIDTH >= 16)
    channels = FIRST + tl.arange(0, WIDTH)
    return rows.to(tl.int64)[:, None] * at[1] + channels.to(tl.int64)[None, :] * at[2]


@triton.jit
def _inside(mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return which elements exist: rows of ``mask``, channels below head_dim."""
    if FIRST + WIDTH > DIM:
        return mask[:, None] & (FIRST + tl.arange(0, WIDTH) < DIM)[None, :]
    else:
        return mask[:, None]


@triton.jit
def _load_part(at, rows, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    return tl.load(at[0] + _offsets(at, rows, FIRST, WIDTH), mask=_inside(mask, FIRST, WIDTH, DIM), other=0.0)


@triton.jit
def load(at, rows, mask, DIMS: tl.constexpr):
    """Load a tile; rows outside ``mask`` and channels beyond head_dim are 0."""
    a = _load_part(at, rows, mask, 0, DIMS[1], DIMS[0])
    if DIMS[2] == 0:
        return (a,)
    else:
        b = _load_part(at, rows, mask, DIMS[1], DIMS[2], DIMS[0])
        if DIMS[3] == 0:
            return (a, b)
        else:
            return (a, b, _load_part(at, rows, mask, DIMS[1] + DIMS[2], DIMS[3], DIMS[0]))


@triton.jit
def _store_part(at, part, rows, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    values = part.to(at[0].dtype.element_ty)
    tl.store(at[0] + _offsets(at, rows, FIRST, WIDTH), values, mask=_inside(mask, FIRST, WIDTH, DIM))


@triton.jit
def store(at, tile, rows, mask, DIMS: tl.constexpr):
    """Store a tile in the dtype of the pointer; rows outside ``mask`` are left alone."""
    _store_part(at, tile[0], rows, mask, 0, DIMS[1], DIMS[0])
    if DIMS[2] > 0:
        _store_part(at, tile[1], rows, mask, DIMS[1], DIMS[2], DIMS[0])
    if DIMS[3] > 0:
        _store_part(at, tile[2], rows, mask, DIMS[1] + DIMS[2], DIMS[3], DIMS[0])


@triton.jit
def zeros(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return a tile of fp32 zeros: an accumulator."""
    a = tl.zeros((ROWS, DIMS[1]), tl.float32)
    if DIMS[2] == 0:
        return (a,)
    elif DIMS[3] == 0:
        return (a, tl.zeros((ROWS, DIMS[2]), tl.float32))
    else:
        return (a, tl.zeros((ROWS, DIMS[2]), tl.float32), tl.zeros((ROWS, DIMS[3]), tl.float32))


@triton.jit
def scale(tile, factor):
    """Return a tile with each row times ``factor`` (rows,)."""
    a = tile[0] * factor[:, None]
    if len(tile) == 1:
        return (a,)
    elif len(tile) == 2:
        return (a, tile[1] * factor[:, None])
    else:
        return (a, tile[1] * factor[:, None], tile[2] * factor[:, None])


@triton.jit
def add(a, b):
    """Return the sum of two tiles."""
    if len(a) == 1:
        return (a[0] + b[0],)
    elif len(a) == 2:
        return (a[0] + b[0], a[1] + b[1])
    else:
        return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


@triton.jit
def products(a, b, PRECISION: tl.constexpr):
    """Return a b^T in fp32, the product of every row of ``a`` with every row of ``b``."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for k in tl.static_range(1, len(a)):
        s = tl.dot(a[k], tl.trans(b[k]), s, input_precision=PRECISION)
    return s  # (rows of a, rows of b)


@triton.jit
def add_product(acc, p, b, PRECISION: tl.constexpr):
    """Return acc + p b, with ``p`` (rows of acc, rows of b) in the dtype of ``b``."""
    first = tl.dot(p, b[0], acc[0], input_precision=PRECISION)
    if len(b) == 1:
        return (first,)
    elif len(b) == 2:
        return (first, tl.dot(p, b[1], acc[1], input_precision=PRECISION))
    else:
        second = tl.dot(p, b[1], acc[1], input_precision=PRECISION)
        return (first, second, tl.dot(p, b[2], acc[2], input_precision=PRECISION))


@triton.jit
def row_products(a, b):
    """Return the product of each row of ``a`` with the same row of ``b``, in fp32."""
    s = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for k in tl.static_range(1, len(a)):
        s += tl.sum(a[k].to(tl.float32) * b[k].to(tl.float32), 1)
    return s  # (rows,)


@triton.jit
def zero_rows(at, first, stop, pid, step, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Zero rows [first, stop): of their blocks of ROWS, ``pid``, ``pid + step``, ..."""
    for start in range(first + pid * ROWS, stop, step * ROWS):
        rows = start + tl.arange(0, ROWS)
        store(at, zeros(ROWS, DIMS), rows, rows < stop, DIMS)


@triton.jit
def zero_numbers(ptr, first, stop, pid, step, ROWS: tl.constexpr):
    """Zero the numbers of rows [first, stop), as ``zero_rows`` does the rows."""
    for start in range(first + pid * ROWS, stop, step * ROWS):
        rows = start + tl.arange(0, ROWS)
        tl.store(ptr + rows, tl.zeros((ROWS,), tl.float32), mask=rows < stop)
