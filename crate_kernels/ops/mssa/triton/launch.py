"""The sizes of a call of mssa, and the arguments that its Triton kernels share.

Kernels take any strides and write into what their launchers allocate; no launch waits for the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import Call
from crate_kernels.ops.mssa.splits import cdiv


class Launch:
    """The sizes of one call, padded or packed.

    Attributes:
        call: its options.
        heads: heads of all sequences.
        nheads, head_dim: sizes of a token.
        seqlen: length of every sequence, or of the longest packed one.
        total: packed rows; 0 for a batch.
    """

    def __init__(self, w: Tensor, call: Call) -> None:
        self.call, self.dtype = call, w.dtype
        self.nheads, self.head_dim = w.shape[1], w.shape[-1]
        if call.cu_seqlens is None:
            sequences, self.seqlen, self.total = w.shape[0], w.shape[2], 0
        else:
            sequences, self.seqlen, self.total = call.cu_seqlens.shape[0] - 1, call.max_seqlen, w.shape[0]
        self.heads = sequences * self.nheads

    def blocks(self, size: int) -> int:
        """Return how many blocks of ``size`` rows the longest sequence has."""
        return max(cdiv(self.seqlen, size), 1)

    def tail(self, size: int) -> int:
        """Return the smallest tile, a power of two, for the rows that blocks leave; packed lengths leave any number."""
        rest = self.seqlen % size
        return size if self.call.packed or not rest else min(max(1 << (rest - 1).bit_length(), 16), size)

    def row_strides(self) -> dict[str, int]:
        """Return the strides of a number per row: lse and its like."""
        strides = (0, self.total) if self.call.packed else (self.nheads * self.seqlen, self.seqlen)
        return {"stride_lb": strides[0], "stride_lh": strides[1]}

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of every kernel."""
        return {
            "cu_seqlens_ptr": self.call.cu_seqlens,
            "nheads": self.nheads,
            "seqlen": self.seqlen,
            "total": self.total,
            "qk_scale": abs(self.call.scale),
            "HEAD_DIM": self.head_dim,
            "PACKED": self.call.packed,
        }

    def form(self) -> dict[str, Any]:
        """Return the arguments of the kernels that attend."""
        call = self.call
        return {
            "mask_ptr": call.key_padding_mask,
            "seed_ptr": call.seed,
            "drop_last": launch.drop_last(call.dropout_p) if call.dropout_p else 0,
            "keep_factor": 1.0 / (1.0 - call.dropout_p),
            "CAUSAL": call.causal,
            "PADDED": call.padded,
            "DROPOUT": call.seed is not None,
            "NEGATIVE": call.scale < 0,
            "PRECISION": launch.dot_precision(self.dtype),
        }


def strides(letter: str, t: Tensor) -> dict[str, int]:
    """Return the stride arguments of a tensor of tokens; a packed batch has no first."""
    steps = t.stride() if t.dim() == 4 else (0, t.stride(1), t.stride(0), t.stride(2))
    return {f"stride_{letter}{axis}": step for axis, step in zip("bhsd", steps, strict=True)}
