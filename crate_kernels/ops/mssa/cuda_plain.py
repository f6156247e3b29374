"""Subspace self-attention by the fp32 products of a GPU's CUDA cores: csrc/mssa/cuda/mssa_plain_cuda.cu.

It takes fp32 tokens, GPUs without the tensor cores' instructions, and whatever else those kernels refuse: any dtype of
the backend, any head_dim to 256, any strides and every argument. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._native import extension
from crate_kernels.ops.mssa.call import Call

extension.load_cuda()
_fwd = torch.ops.crate_kernels_C.cuda_mssa_plain_fwd.default
_bwd = torch.ops.crate_kernels_C.cuda_mssa_plain_bwd.default


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _level(threshold: float | None) -> float:
    """Return the threshold, or -1 for the softmax."""
    return -1.0 if threshold is None else threshold


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    out = operator.empty_out(w)
    rows = (w.shape[1], w.shape[0]) if cu_seqlens is not None else w.shape[:3]
    lse = w.new_empty(rows, dtype=torch.float32)
    masks = (_contiguous(key_padding_mask), _contiguous(cu_seqlens))
    _fwd(w, *masks, max_seqlen, seed, causal, scale, dropout_p, _level(threshold), out, lse)
    return out, lse


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    dw, lse = operator.empty_out(w), lse.contiguous()
    masks = (_contiguous(key_padding_mask), _contiguous(cu_seqlens))
    numbers = (causal, scale, dropout_p, _level(threshold))
    _bwd(dout, _contiguous(dlse), w, out, lse, *masks, max_seqlen, seed, *numbers, torch.empty_like(lse), dw)
    return dw
