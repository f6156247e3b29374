"""The sizes of a call of mssa, and the arguments that its Triton kernels share.

Kernels take any strides and write into what their launchers allocate; no launch waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels._triton.jit import Strided
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.splits import cdiv
from crate_kernels.ops.mssa.triton.head import KernelForm, Options, form_of
from crate_kernels.ops.mssa.triton.tile import split_dims


class HeadSizes:
    """The sizes of one call, padded or packed.

    Attributes:
        call: its call.
        heads: heads of all sequences.
        nheads, head_dim: sizes of a token.
        seqlen: length of every sequence, or of the longest packed one.
        total: packed rows; 0 for a batch.
    """

    def __init__(self, w: Tensor, call: MSSACall) -> None:
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

    def form(self, block: int, tail: int, softmax: str = "online") -> KernelForm:
        """Return the constants of the kernels that walk over tiles of ``block`` rows, of ``tail`` where masks cut."""
        call = self.call
        # Products of fp32 hold all of a part's channels in each thread: 128 of them leave too few registers.
        widest = 64 if self.dtype == torch.float32 else 256
        return form_of(
            *split_dims(self.head_dim, widest),
            PRECISION=launch.dot_precision(self.dtype),
            BLOCK=block,
            TAIL=tail,
            SOFTMAX=softmax,
            CAUSAL=call.causal,
            PADDED=call.padded,
            PACKED=call.packed,
            DROPOUT=call.seed is not None,
            NEGATIVE=call.scale < 0,
        )

    def arguments(self) -> dict[str, Any]:
        """Return what every kernel takes: the sizes and the call."""
        call = self.call
        options = Options(
            # 0 for None, which Triton 3.6 cannot return from a function.
            cu_seqlens_ptr=0 if call.cu_seqlens is None else call.cu_seqlens,
            mask_ptr=0 if call.key_padding_mask is None else call.key_padding_mask,
            seed_ptr=0 if call.seed is None else call.seed,
            qk_scale=magnitude(call.scale),
            scale=call.scale,
            drop_last=launch.drop_last(call.dropout_p) if call.dropout_p else 0,
            keep_factor=1.0 / (1.0 - call.dropout_p),
            threshold=call.threshold or 0.0,
        )
        return {"nheads": self.nheads, "seqlen": self.seqlen, "total": self.total, "call": options}


def magnitude(scale: float) -> float:
    """Return |scale|, and of 0 fp32's smallest normal number.

    -inf times it stays -inf, and products up to 2^100 times it leave weights equal.
    """
    return max(abs(scale), 2.0**-126)


def strided(t: Tensor) -> Strided:
    """Return a tensor of tokens for a kernel; a packed one has no batch."""
    return Strided(t, *(t.stride() if t.dim() == 4 else (0, t.stride(1), t.stride(0), t.stride(2))))
