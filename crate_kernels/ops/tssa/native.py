"""Token-statistics attention by csrc/tssa: C++ for tensors on the CPU, CUDA C++ for those on a GPU.

The kernels take tokens and gradients in any strides, and write into what is allocated here. Whatever has no channels is
small, and given to them contiguous and in fp32.

The CUDA library says into how many chunks it cuts a sequence, 0 where it does not, and refuses a token without
channels or too wide for the device's shared memory. Its workspaces are allocated here too; nothing waits for the
device. It clears packed rows that no sequence covers; on CPUs that is done here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import backends, operator, packing
from crate_kernels._native.extension import Library, library
from crate_kernels.ops.tssa.call import Call, State


def _plain(x: Tensor | None) -> Any:
    if x is None or (
        x.dtype == torch.float32 and x.is_contiguous()
    ):  # a fifth of the time of two calls that do nothing
        return x
    return x.to(torch.float32).contiguous()


def _nchunks(lib: Library, w: Tensor, dout: Tensor | None, call: Call, causal: bool) -> int:
    """Return into how many chunks a sequence is cut, before anything is allocated; 0 on CPUs."""
    if not lib.cuda:
        return 0
    count = lib.tssa_causal_chunks if causal else lib.tssa_chunks
    nchunks = count(w, dout, call.cu_seqlens, call.max_seqlen)
    if nchunks < 0:
        got = f"got nheads * head_dim = {w.shape[1]} * {w.shape[-1]}"
        if not w.shape[1] * w.shape[-1]:
            raise backends.Refused(f"takes tokens with channels, {got}")
        direction = "forward" if dout is None else "backward"
        raise backends.Refused(f"takes tokens that fit this GPU's shared memory in its {direction} pass, {got}")
    return nchunks


def _clear(lib: Library, call: Call, *written: Tensor) -> None:
    """Clear what no sequence covers of tokens, and then of a membership, where the kernels do not."""
    if call.packed and not lib.cuda:
        for dim, x in enumerate(written):
            packing.clear_uncovered(x, call.cu_seqlens, dim)


def _empty_dtemp(lib: Library, w: Tensor, call: Call) -> Tensor:
    """Allocate dtemp, (nheads,) on CPUs, or that of each sequence, (sequences, nheads)."""
    sizes = (call.nsequences(w), w.shape[1]) if lib.cuda else (w.shape[1],)
    return w.new_empty(sizes, dtype=torch.float32)


def _empty_sums(w: Tensor, call: Call, nchunks: int, by_channel: int = 1) -> Tensor | None:
    """Allocate the sums of every chunk and, behind them, of the sequence; None where that is not cut."""
    if not nchunks:
        return None
    sizes = (call.nsequences(w), nchunks + 1, w.shape[1] * (by_channel * w.shape[-1] + 1))
    return w.new_empty(sizes, dtype=torch.float32)


def forward(w: Tensor, temp: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, membership, the column energies c and the second moments M."""
    lib = library(w.device.type)
    nchunks = _nchunks(lib, w, None, call, causal=False)
    out, membership, energy = operator.empty_out(w), call.empty_membership(w), call.empty_channels(w)
    moment = torch.empty_like(energy)
    _clear(lib, call, out, membership)
    sums = [_empty_sums(w, call, nchunks) for _ in range(2)] if lib.cuda else ()
    lib.tssa_fwd(w, _plain(temp), *call, out, membership, energy, moment, *sums)
    return out, membership, energy, moment


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    lib = library(w.device.type)
    nchunks = _nchunks(lib, w, dout, call, causal=False)
    dw, dtemp = operator.empty_out(w), _empty_dtemp(lib, w, call)
    _clear(lib, call, dw)
    workspace = ()
    if lib.cuda:
        sums = (_empty_sums(w, call, nchunks) for _ in range(2))
        workspace = call.empty_membership(w) if nchunks else None, *sums
    saved = w, _plain(temp), _plain(membership), _plain(energy), _plain(moment)
    lib.tssa_bwd(dout, _plain(dmembership), *saved, *call, dw, dtemp, *workspace)
    return dw, (dtemp.sum(0) if lib.cuda else dtemp).to(temp.dtype)


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Return out and membership of the causal form."""
    lib = library(w.device.type)
    nchunks = _nchunks(lib, w, None, call, causal=True)
    out, membership = operator.empty_out(w), call.empty_membership(w)
    _clear(lib, call, out, membership)
    sums = [_empty_sums(w, call, nchunks) for _ in range(2)] if lib.cuda else ()
    lib.tssa_causal_fwd(w, _plain(temp), _plain(denom_bias), *call, out, membership, *sums)
    return out, membership


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    lib = library(w.device.type)
    nchunks = _nchunks(lib, w, dout, call, causal=True)
    dw, bias = operator.empty_out(w), _plain(denom_bias)
    _clear(lib, call, dw)
    ddenom_bias = None if bias is None else torch.empty_like(bias)
    totals = _empty_sums(w, call, nchunks, by_channel=2)
    dmoments, denergies = (_empty_sums(w, call, nchunks) for _ in range(2))
    dtemp = _empty_dtemp(lib, w, call) if denergies is None else denergies[:, -1, w.shape[1] * w.shape[-1] :]
    workspace = (call.empty_membership(w), totals, dmoments, denergies) if lib.cuda else ()
    saved = w, _plain(temp), bias, _plain(membership)
    lib.tssa_causal_bwd(
        dout, _plain(dmembership), *saved, *call, dw, None if nchunks else dtemp, ddenom_bias, *workspace
    )
    gradient = (dtemp.sum(0) if lib.cuda else dtemp).to(temp.dtype)
    if denom_bias is None or ddenom_bias is None:
        return dw, gradient, temp.new_empty(0)
    return dw, gradient, ddenom_bias.to(denom_bias.dtype)


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    state: State,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place.

    On a GPU a step is one launch, which reads the sums and writes them back. A long block, as a prompt, goes by chunks,
    whose sums then are the state.
    """
    lib, call = library(w.device.type), Call(key_padding_mask)
    nchunks = _nchunks(lib, w, None, call, causal=True)
    out, membership = operator.empty_out(w), call.empty_membership(w)
    sums = [_empty_sums(w, call, nchunks) for _ in range(2)] if lib.cuda else ()
    lib.tssa_decode(w, _plain(temp), _plain(denom_bias), *state, key_padding_mask, out, membership, *sums)
    if nchunks:
        by_energy, by_moment = (s[:, -1] for s in sums if s is not None)
        channels = w.shape[1] * w.shape[-1]
        state.energy.copy_(by_energy[:, :channels].view_as(state.energy))
        state.weighted.copy_(by_moment[:, :channels].view_as(state.weighted))
        state.mass.copy_(by_moment[:, channels:])
    if nchunks or not lib.cuda:  # a step on a GPU counts its tokens itself
        state.lengths.add_(w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1))
    return out, membership
