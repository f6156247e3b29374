"""Subspace self-attention by the C++ extension's CPU kernels: csrc/mssa.

The kernels take any strides and write into what is allocated here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator, packing
from crate_kernels._native import extension
from crate_kernels.ops.mssa.call import Call, DecodeCall

extension.load()
_fwd = torch.ops.crate_kernels_C.mssa_fwd.default
_bwd = torch.ops.crate_kernels_C.mssa_bwd.default
_decode = torch.ops.crate_kernels_C.mssa_decode.default


def _level(threshold: float | None) -> float:
    """Return the threshold, or -1 for the softmax."""
    return -1.0 if threshold is None else threshold


def _output(w: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Allocate an output like ``w``."""
    return packing.clear_uncovered(operator.empty_out(w), cu_seqlens, 0)


def forward(w: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse``; shapes as in the public function."""
    key_padding_mask, cu_seqlens, _, seed, causal, scale, dropout_p, threshold = call
    out = _output(w, cu_seqlens)
    rows = (w.shape[1], w.shape[0]) if cu_seqlens is not None else w.shape[:3]
    lse = packing.clear_uncovered(torch.empty(rows, dtype=torch.float32, device=w.device), cu_seqlens, 1)
    level = _level(threshold)
    _fwd(w, key_padding_mask, cu_seqlens, seed, causal, scale, dropout_p, level, out, lse)
    return out, lse


def backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call) -> Tensor:
    """Return the gradient of ``w``."""
    key_padding_mask, cu_seqlens, _, seed, causal, scale, dropout_p, threshold = call
    dw = _output(w, cu_seqlens)
    level = _level(threshold)
    lse = lse.contiguous()
    _bwd(dout, dlse, w, out, lse, key_padding_mask, cu_seqlens, seed, causal, scale, dropout_p, level, dw)
    return dw


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Append ``w`` to the cache and attend over it; the lengths alone say where, whatever ``bound`` is."""
    key_padding_mask, _, _, scale, need_lse = call
    out = operator.empty_out(w)
    lse = w.new_empty(w.shape[:3] if need_lse else (0,), dtype=torch.float32)
    _decode(w, data, lengths, key_padding_mask, scale, out, lse)
    return out, lse
