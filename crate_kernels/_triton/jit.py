"""Triton helpers that kernels of more than one operator call."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# Triton's compiler reads these functions; their types are not Python's.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Strided(NamedTuple):
    """A tensor of tokens, (batch, nheads, seqlen, head_dim), or packed with stride_b = 0."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    stride_d: Any


@triton.jit
def rounded_product(a, b):
    """Return a b, rounded before anything is added to it.

    Compilers fuse ``a * b - c`` to one multiply-add; for ``c = a * b`` it gives the rounding error of ``c``, not 0.
    They do not fuse again a product that is already a multiply-add, with 0.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def keep_mask(seed, head, rows, columns, drop_last):
    """Return the dropout mask of a head's (row, column) weights, True = keep: ``philox.keep_factor`` bit for bit.

    ``seed`` is the int64 of the call, ``head`` the int32 batch * nheads + head. ``rows`` and ``columns`` are int32
    and broadcast together. ``drop_last`` is ``launch.drop_last(p)``: the largest dropped word, shifted by 2^31 so
    that it is an int32 for every p.
    """
    shape = rows + columns
    c0 = (shape - rows).to(tl.uint32)
    c1 = (shape - columns).to(tl.uint32)
    c2 = (shape * 0 + head).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, c0, c1, c2, c2 * 0)
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) > drop_last


@triton.jit
def sequence_bounds(cu_seqlens_ptr, index, seqlen, total, PACKED: tl.constexpr):
    """Return (first row, length) of a sequence: its packed offsets, clamped to existing rows, or a whole padded row.

    ``seqlen`` is the length of every sequence, or of the longest packed one; ``total`` the number of packed rows.
    """
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + index), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + index + 1), 0), total)
        return start, tl.minimum(tl.maximum(end - start, 0), seqlen)
    else:
        return index * 0, index * 0 + seqlen


@triton.jit
def uncovered(cu_seqlens_ptr, index, sequences, seqlen, total):
    """Return the packed rows around a sequence that belong to no sequence: [0, lead) and [first, stop).

    These are the rows after it and, of the first sequence, those before it. Valid offsets rise from 0 to ``total`` by
    at most ``seqlen`` and leave no such rows. Offsets are checked on the CPU only; on other devices such rows are
    written as zeros.
    """
    start, length = sequence_bounds(cu_seqlens_ptr, index, seqlen, total, True)
    following = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + index + 1), 0), total)
    lead = tl.where(index == 0, start, 0)
    return lead, start + length, tl.where(index == sequences - 1, total, following)
