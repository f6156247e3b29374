"""Checks of the tensors that kernels in Python are given; csrc/mssa/given.h has those of kernels in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import given, operator
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall

_BACKWARD = "mssa backward"


def forward(w: Tensor, call: MSSACall) -> None:
    """Check the tensors of a forward."""
    given.options("mssa", w, call.key_padding_mask, call.cu_seqlens, call.seed)


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall) -> None:
    """Check the tensors of a backward."""
    given.options(_BACKWARD, w, call.key_padding_mask, call.cu_seqlens, call.seed)
    shape, device = w.shape, w.device
    rows = shape[:3] if call.cu_seqlens is None else (shape[1], shape[0])
    numbers = operator.stat_dtype(w.dtype), rows, device
    given.tensor(_BACKWARD, "out", out, w.dtype, shape, device)
    given.tensor(_BACKWARD, "lse", lse, *numbers)
    if dout is not None:
        given.tensor(_BACKWARD, "dout", dout, w.dtype, shape, device)
    if dlse is not None:
        given.tensor(_BACKWARD, "dlse", dlse, *numbers)


def logsumexp_backward(dlse: Tensor, w: Tensor, lse: Tensor, call: MSSACall) -> None:
    """Check the tensors of a backward of lse alone, in a batch."""
    given.options(_BACKWARD, w, call.key_padding_mask, None, call.seed)
    for name, numbers in (("dlse", dlse), ("lse", lse)):
        given.tensor(_BACKWARD, name, numbers, operator.stat_dtype(w.dtype), w.shape[:3], w.device)


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> None:
    """Check the tensors of a step with a cache, which may repeat another and then comes here alone."""
    for name, value in (("w", w), ("cache.data", data), ("cache.lengths", lengths)):
        given.in_memory("mssa", name, value)
    given.options("mssa", w, call.key_padding_mask, None, None)
    given.floating("mssa", "cache.data", data, 4)
    batch, nheads, _, head_dim = w.shape
    given.tensor("mssa", "cache.data", data, w.dtype, (batch, nheads, data.shape[2], head_dim), w.device)
    given.tensor("mssa", "cache.lengths", lengths, torch.int32, (batch,), w.device)
