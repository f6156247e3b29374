"""Subspace self-attention by the fp32 products of a GPU's CUDA cores: csrc/mssa/cuda/mssa_plain_cuda.cu.

It takes fp32 tokens, GPUs without the tensor cores' instructions, and whatever else those kernels refuse: any dtype of
the backend, any head_dim to 256, any strides and every argument. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._native import extension

extension.load_cuda()
_fwd = torch.ops.crate_kernels_C.cuda_mssa_plain_fwd.default
_bwd = torch.ops.crate_kernels_C.cuda_mssa_plain_bwd.default


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _level(phi: str, threshold: float) -> float:
    """Return the threshold, or -1 for the softmax."""
    return threshold if phi == "threshold" else -1.0


def forward(
    w: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    phi: str,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    out = operator.empty_out(w)
    rows = (w.shape[1], w.shape[0]) if cu_seqlens is not None else w.shape[:3]
    lse = w.new_empty(rows, dtype=torch.float32)
    masks = (_contiguous(key_padding_mask), _contiguous(cu_seqlens))
    _fwd(w, *masks, max_seqlen, seed, causal, scale, dropout_p, _level(phi, threshold), out, lse)
    return out, lse


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    w: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    phi: str,
    threshold: float,
) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    dw, lse = operator.empty_out(w), lse.contiguous()
    masks = (_contiguous(key_padding_mask), _contiguous(cu_seqlens))
    numbers = (causal, scale, dropout_p, _level(phi, threshold))
    _bwd(dout, _contiguous(dlse), w, out, lse, *masks, max_seqlen, seed, *numbers, torch.empty_like(lse), dw)
    return dw
