"""Token-statistics attention by the C++ extension's CPU kernels: csrc/tssa.

The kernels take tokens and gradients in any strides and write into what is allocated here; what has no channels is
small, and given to them contiguous, offsets in int32 and the rest in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import operator, packing
from crate_kernels._native import extension

extension.load()
_fwd = torch.ops.crate_kernels_C.tssa_fwd.default
_bwd = torch.ops.crate_kernels_C.tssa_bwd.default
_causal_fwd = torch.ops.crate_kernels_C.tssa_causal_fwd.default
_causal_bwd = torch.ops.crate_kernels_C.tssa_causal_bwd.default
_decode = torch.ops.crate_kernels_C.tssa_decode.default


def _plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _like(w: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return packing.clear_uncovered(operator.empty_out(w), cu_seqlens, 0)


def _membership(w: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    rows = (w.shape[1], w.shape[0]) if cu_seqlens is not None else w.shape[:3]
    return packing.clear_uncovered(w.new_empty(rows, dtype=torch.float32), cu_seqlens, 1)


def forward(
    w: Tensor,
    temp: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, membership, the column energies c and the second moments M."""
    batch = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    energy = w.new_empty(batch, w.shape[1], w.shape[-1], dtype=torch.float32)
    moment = torch.empty_like(energy)
    out, membership = _like(w, cu_seqlens), _membership(w, cu_seqlens)
    _fwd(
        w,
        _plain(temp),
        key_padding_mask,
        _plain(cu_seqlens, torch.int32),
        seed,
        dropout_p,
        out,
        membership,
        energy,
        moment,
    )
    return out, membership, energy, moment


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    dw, dtemp = _like(w, cu_seqlens), temp.new_empty(temp.shape, dtype=torch.float32)
    saved = w, _plain(temp), _plain(membership), _plain(energy), _plain(moment)
    _bwd(
        dout, _plain(dmembership), *saved, key_padding_mask, _plain(cu_seqlens, torch.int32), seed, dropout_p, dw, dtemp
    )
    return dw, dtemp.to(temp.dtype)


def forward_causal(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return out and membership of the causal form."""
    out, membership = _like(w, cu_seqlens), _membership(w, cu_seqlens)
    options = key_padding_mask, _plain(cu_seqlens, torch.int32), seed, dropout_p
    _causal_fwd(w, _plain(temp), _plain(denom_bias), *options, out, membership)
    return out, membership


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    seed: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    dw, dtemp = _like(w, cu_seqlens), temp.new_empty(temp.shape, dtype=torch.float32)
    bias, options = _plain(denom_bias), (key_padding_mask, _plain(cu_seqlens, torch.int32), seed, dropout_p)
    ddenom_bias = None if bias is None else torch.empty_like(bias)
    saved = w, _plain(temp), bias, _plain(membership)
    _causal_bwd(dout, _plain(dmembership), *saved, *options, dw, dtemp, ddenom_bias)
    if denom_bias is None or ddenom_bias is None:
        return dw, dtemp.to(temp.dtype), temp.new_empty(0)
    return dw, dtemp.to(temp.dtype), ddenom_bias.to(denom_bias.dtype)


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    energy: Tensor,
    weighted: Tensor,
    mass: Tensor,
    lengths: Tensor,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place."""
    out, membership = operator.empty_out(w), w.new_empty(w.shape[:3], dtype=torch.float32)
    state = energy, weighted, mass, lengths
    _decode(w, _plain(temp), _plain(denom_bias), *state, key_padding_mask, out, membership)
    lengths += w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1)
    return out, membership
