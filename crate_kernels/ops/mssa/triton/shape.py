"""Sizes and strides of a call of mssa, as its Triton launchers need them."""

from __future__ import annotations

from torch import Tensor


def shape(w: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> tuple[int, int, int, int]:
    """Return sequences, heads, the longest length and the number of packed rows."""
    if cu_seqlens is None:
        batch, nheads, seqlen, _ = w.shape
        return batch, nheads, seqlen, 0
    return cu_seqlens.shape[0] - 1, w.shape[1], max_seqlen, w.shape[0]


def strides(w: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of batch, head, row and channel; a packed batch has no first."""
    if w.dim() == 4:
        return w.stride()  # pyright: ignore[reportReturnType]
    return 0, w.stride(1), w.stride(0), w.stride(2)


def row_strides(nheads: int, seqlen: int, total: int, packed: bool) -> tuple[int, int]:
    """Return the strides of batch and head of a number a row: lse and its like."""
    return (0, total) if packed else (nheads * seqlen, seqlen)


def tail(length: int, block: int) -> int:
    """Return the smallest tile, a power of two, that covers what blocks of ``block`` leave of a length."""
    rest = length % block
    return min(max(1 << (rest - 1).bit_length(), 16), block) if rest else block
