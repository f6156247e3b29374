"""Token-statistics attention by the CUDA library: csrc/tssa.

The library says how a call is cut up: 0 chunks is a sequence on chip, and -1 a token without channels, or too wide for
the device's shared memory, which is refused. The workspaces that go with it are allocated here; nothing waits for the
device. The kernels take tokens and gradients in any strides; what has no channels is small, and given to them
contiguous, offsets in int32 and the rest in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._core import backends, operator
from crate_kernels._native import extension

extension.load_cuda()
_chunks = torch.ops.crate_kernels_C.cuda_tssa_chunks.default
_fwd = torch.ops.crate_kernels_C.cuda_tssa_fwd.default
_bwd = torch.ops.crate_kernels_C.cuda_tssa_bwd.default
_causal_chunks = torch.ops.crate_kernels_C.cuda_tssa_causal_chunks.default
_causal_fwd = torch.ops.crate_kernels_C.cuda_tssa_causal_fwd.default
_causal_bwd = torch.ops.crate_kernels_C.cuda_tssa_causal_bwd.default


def _cut(count: Callable, w: Tensor, dout: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int) -> int:
    """Return into how many chunks ``count`` cuts a sequence, before anything is allocated."""
    nchunks = count(w, dout, cu_seqlens, max_seqlen)
    if nchunks < 0:
        got = f"got nheads * head_dim = {w.shape[1]} * {w.shape[-1]}"
        if not w.shape[1] * w.shape[-1]:
            raise backends.Refused(f"takes tokens with channels, {got}")
        direction = "forward" if dout is None else "backward"
        raise backends.Refused(f"takes tokens that fit this GPU's shared memory in its {direction} pass, {got}")
    return nchunks


def _plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


def _sequences(w: Tensor, cu_seqlens: Tensor | None) -> int:
    return w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _rows(w: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Allocate a number a token and head: (batch, nheads, seqlen) or (nheads, total)."""
    sizes = w.shape[:3] if cu_seqlens is None else (w.shape[1], w.shape[0])
    return w.new_empty(sizes, dtype=torch.float32)


def _sums(w: Tensor, cu_seqlens: Tensor | None, nchunks: int, by_channel: int = 1) -> Tensor:
    """Allocate the sums of every chunk and, behind them, of the sequence."""
    nheads, head_dim = w.shape[1], w.shape[-1]
    sizes = (_sequences(w, cu_seqlens), nchunks + 1, nheads * (by_channel * head_dim + 1))
    return w.new_empty(sizes, dtype=torch.float32)


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
    options = key_padding_mask, _plain(cu_seqlens, torch.int32), max_seqlen, seed, dropout_p
    nchunks = _cut(_chunks, w, None, cu_seqlens, max_seqlen)
    out, membership = operator.empty_out(w), _rows(w, cu_seqlens)
    energy = w.new_empty(_sequences(w, cu_seqlens), w.shape[1], w.shape[-1], dtype=torch.float32)
    moment = torch.empty_like(energy)
    sums = [_sums(w, cu_seqlens, nchunks) if nchunks else None for _ in range(2)]
    _fwd(w, _plain(temp), *options, out, membership, energy, moment, *sums)
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
    options = key_padding_mask, _plain(cu_seqlens, torch.int32), max_seqlen, seed, dropout_p
    nchunks = _cut(_chunks, w, dout, cu_seqlens, max_seqlen)
    dw = operator.empty_out(w)
    dtemp = w.new_empty(_sequences(w, cu_seqlens), w.shape[1], dtype=torch.float32)
    dlogit = _rows(w, cu_seqlens) if nchunks else None
    sums = [_sums(w, cu_seqlens, nchunks) if nchunks else None for _ in range(2)]
    saved = w, _plain(temp), _plain(membership), _plain(energy), _plain(moment)
    _bwd(dout, _plain(dmembership), *saved, *options, dw, dtemp, dlogit, *sums)
    return dw, dtemp.sum(0).to(temp.dtype)


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
    options = key_padding_mask, _plain(cu_seqlens, torch.int32), max_seqlen, seed, dropout_p
    nchunks = _cut(_causal_chunks, w, None, cu_seqlens, max_seqlen)
    out, membership = operator.empty_out(w), _rows(w, cu_seqlens)
    sums = [_sums(w, cu_seqlens, nchunks) if nchunks > 1 else None for _ in range(2)]
    _causal_fwd(w, _plain(temp), _plain(denom_bias), *options, out, membership, *sums, None, None, None, None)
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
    options = key_padding_mask, _plain(cu_seqlens, torch.int32), max_seqlen, seed, dropout_p
    nchunks = _cut(_causal_chunks, w, dout, cu_seqlens, max_seqlen)
    dw, dlogit, bias = operator.empty_out(w), _rows(w, cu_seqlens), _plain(denom_bias)
    ddenom_bias = None if bias is None else torch.empty_like(bias)
    if nchunks > 1:
        dtemp, totals = None, _sums(w, cu_seqlens, nchunks, by_channel=2)
        dmoments, denergies = (_sums(w, cu_seqlens, nchunks) for _ in range(2))
        by_sequence = denergies[:, -1, w.shape[1] * w.shape[-1] :]
    else:
        by_sequence = dtemp = w.new_empty(_sequences(w, cu_seqlens), w.shape[1], dtype=torch.float32)
        totals = dmoments = denergies = None
    saved = w, _plain(temp), bias, _plain(membership)
    _causal_bwd(
        dout, _plain(dmembership), *saved, *options, dw, dlogit, dtemp, ddenom_bias, totals, dmoments, denergies
    )
    gradient = by_sequence.sum(0).to(temp.dtype)
    if denom_bias is None or ddenom_bias is None:
        return dw, gradient, temp.new_empty(0)
    return dw, gradient, ddenom_bias.to(denom_bias.dtype)


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
    """Advance the running sums over the new tokens; they are changed in place.

    A step is one launch, which reads the sums and writes them back. A long block, as a prompt, goes by chunks, whose
    sums then are the state.
    """
    nchunks = _cut(_causal_chunks, w, None, None, 0)
    out, membership = operator.empty_out(w), _rows(w, None)
    sums = [_sums(w, None, nchunks) if nchunks > 1 else None for _ in range(2)]
    options, state = (key_padding_mask, None, 0, None, 0.0), (energy, weighted, mass, lengths)
    _causal_fwd(w, _plain(temp), _plain(denom_bias), *options, out, membership, *sums, *state)
    by_energy, by_moment = sums
    if by_energy is not None and by_moment is not None:
        channels = w.shape[1] * w.shape[-1]
        energy.copy_(by_energy[:, -1, :channels].view_as(energy))
        weighted.copy_(by_moment[:, -1, :channels].view_as(weighted))
        mass.copy_(by_moment[:, -1, channels:])
        lengths += w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1)
    return out, membership
