"""Subspace self-attention by the C++ extension's CUDA kernels: csrc/mssa.

Tensor cores take bfloat16 and float16 on GPUs that have them for both (sm_80 and later); the rest is cuda_plain's, and
decoding cuda_decode's. The kernels take any strides and write into what is allocated here; nothing here waits for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._native import extension
from crate_kernels.ops.mssa import cuda_plain
from crate_kernels.ops.mssa.call import Call
from crate_kernels.ops.mssa.cuda_decode import decode

__all__ = ["backward", "decode", "forward"]

extension.load_cuda()
_takes = torch.ops.crate_kernels_C.cuda_mssa_takes.default
_fwd = torch.ops.crate_kernels_C.cuda_mssa_fwd.default
_bwd = torch.ops.crate_kernels_C.cuda_mssa_bwd.default


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _level(threshold: float | None) -> float:
    """Return the threshold, or -1 for the softmax."""
    return -1.0 if threshold is None else threshold


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    if not _takes(w):
        return cuda_plain.forward(w, call)
    out = operator.empty_out(w)
    rows = (w.shape[1], w.shape[0]) if cu_seqlens is not None else w.shape[:3]
    lse = w.new_empty(rows, dtype=torch.float32)
    if out.numel():
        tensors = (w, _contiguous(key_padding_mask), _contiguous(cu_seqlens), seed)
        _fwd(*tensors, max_seqlen, causal, scale, dropout_p, _level(threshold), out, lse)
    return out, lse


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``; ``dout`` or ``dlse`` is None where that output got no gradient."""
    key_padding_mask, cu_seqlens, max_seqlen, seed, causal, scale, dropout_p, threshold = call
    if not _takes(w):
        return cuda_plain.backward(dout, dlse, w, out, lse, call)
    dw = operator.empty_out(w)
    if dw.numel():
        lse = lse.contiguous()
        shift = torch.empty_like(lse)
        upstream = (dout, _contiguous(dlse))
        tensors = (w, out, lse, _contiguous(key_padding_mask), _contiguous(cu_seqlens), seed)
        _bwd(*upstream, *tensors, max_seqlen, causal, scale, dropout_p, _level(threshold), shift, dw)
    return dw
