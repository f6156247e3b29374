"""Checks the tensors of kernels in Python; csrc/mssa/op_checks.h checks those of kernels in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import op_checks, operator
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall

_BACKWARD = "mssa backward"


def forward(w: Tensor, call: MSSACall) -> None:
    """Check the tensors of a forward."""
    op_checks.options("mssa", w, call.key_padding_mask, call.cu_seqlens, call.seed)


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: MSSACall) -> None:
    """Check the tensors of a backward."""
    op_checks.options(_BACKWARD, w, call.key_padding_mask, call.cu_seqlens, call.seed)
    shape, device = w.shape, w.device
    rows = shape[:3] if call.cu_seqlens is None else (shape[1], shape[0])
    numbers = operator.stat_dtype(w.dtype), rows, device
    op_checks.tensor(_BACKWARD, "out", out, w.dtype, shape, device)
    op_checks.tensor(_BACKWARD, "lse", lse, *numbers)
    if dout is not None:
        op_checks.tensor(_BACKWARD, "dout", dout, w.dtype, shape, device)
    if dlse is not None:
        op_checks.tensor(_BACKWARD, "dlse", dlse, *numbers)


def logsumexp_backward(dlse: Tensor, w: Tensor, lse: Tensor, call: MSSACall) -> None:
    """Check the tensors of a backward of lse alone, in a batch."""
    op_checks.options(_BACKWARD, w, call.key_padding_mask, None, call.seed)
    for name, numbers in (("dlse", dlse), ("lse", lse)):
        op_checks.tensor(_BACKWARD, name, numbers, operator.stat_dtype(w.dtype), w.shape[:3], w.device)


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> None:
    """Check the tensors of a step with a cache; a step that repeats another has no other check."""
    for name, value in (("w", w), ("cache.data", data), ("cache.lengths", lengths)):
        op_checks.in_memory("mssa", name, value)
    op_checks.options("mssa", w, call.key_padding_mask, None, None)
    op_checks.floating("mssa", "cache.data", data, 4)
    batch, nheads, _, head_dim = w.shape
    op_checks.tensor("mssa", "cache.data", data, w.dtype, (batch, nheads, data.shape[2], head_dim), w.device)
    op_checks.tensor("mssa", "cache.lengths", lengths, torch.int32, (batch,), w.device)
