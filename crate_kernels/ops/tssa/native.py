"""Token-statistics attention by csrc/tssa: C++ for tensors on the CPU, CUDA C++ for those on a GPU.

The kernels take tokens and gradients in any strides, and write into tensors that are allocated here. Tensors without
channels are small: the kernels take them contiguous and in fp32. Both forms, and decoding, are one op forward and one
backward.

The CUDA library says into how many chunks it cuts a sequence, 0 where it does not, and refuses a token without
channels or too wide for the device's shared memory. Its workspaces are allocated here too; nothing waits for the
device. It clears packed rows that no sequence covers; on CPUs that is done here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import backends, operator, packing
from crate_kernels._native.extension import Library, library
from crate_kernels.ops.tssa.call import Call, State


class _Saved(NamedTuple):
    """Tensors that a backward reads beside the gradients of the outputs."""

    w: Tensor
    temp: Tensor
    denom_bias: Tensor | None
    membership: Tensor
    energy: Tensor | None = None
    moment: Tensor | None = None


def _plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
    """Return a parameter contiguous, and in float32 if it is of ``dtype``; C++ refuses others."""
    # A fifth of the time of two calls that do nothing.
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return (x.float() if x.dtype == dtype else x).contiguous()


def _nchunks(lib: Library, w: Tensor, dout: Tensor | None, call: Call, causal: bool) -> int:
    """Return into how many chunks a sequence is cut, before anything is allocated; 0 on CPUs."""
    if not lib.cuda:
        return 0
    nchunks = lib.tssa_chunks(causal, w, dout, call.cu_seqlens, call.max_seqlen)
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


def _empty_sums(w: Tensor, call: Call, nchunks: int, by_channel: int = 1) -> Tensor | None:
    """Allocate the sums of every chunk and, behind them, of the sequence; None where that is not cut."""
    if not nchunks:
        return None
    sizes = (call.nsequences(w), nchunks + 1, w.shape[1] * (by_channel * w.shape[-1] + 1))
    return w.new_empty(sizes, dtype=torch.float32)


def _run_forward(
    w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: Call, causal: bool, state: State | None = None
) -> tuple[Tensor, ...]:
    """Return out, membership and, of the full form, energy and moment.

    ``state`` is advanced: its lengths only by a GPU, and where a sequence is not cut.
    """
    lib = library(w.device)
    nchunks = _nchunks(lib, w, None, call, causal)
    out, membership = operator.empty_out(w), call.empty_membership(w)
    statistics = () if causal else (call.empty_channels(w), call.empty_channels(w))
    _clear(lib, call, out, membership)
    sums = [_empty_sums(w, call, nchunks) for _ in range(2)]
    held = state or (*(statistics or (None, None)), None, None)
    lib.tssa_fwd(causal, w, _plain(temp, w.dtype), _plain(denom_bias, w.dtype), *call, out, membership, *held, *sums)
    return out, membership, *statistics


def _run_backward(
    dout: Tensor, dmembership: Tensor | None, saved: _Saved, call: Call, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    w, temp, lib = saved.w, saved.temp, library(saved.w.device)
    nchunks = _nchunks(lib, w, dout, call, causal)
    dw, bias = operator.empty_out(w), _plain(saved.denom_bias, w.dtype)
    _clear(lib, call, dw)
    ddenom_bias = None if bias is None else torch.empty_like(bias)
    dlogit = call.empty_membership(w) if nchunks or (causal and lib.cuda) else None
    sums_1 = _empty_sums(w, call, nchunks, by_channel=2 if causal else 1)
    sums_2, sums_3 = _empty_sums(w, call, nchunks), _empty_sums(w, call, nchunks if causal else 0)
    if sums_3 is None:
        # By sequence on a GPU, (sequences, nheads).
        sizes = (call.nsequences(w), w.shape[1]) if lib.cuda else (w.shape[1],)
        dtemp = written = w.new_empty(sizes, dtype=torch.float32)
    else:
        dtemp, written = sums_3[:, -1, w.shape[1] * w.shape[-1] :], None
    tensors = w, _plain(temp, w.dtype), bias, *(_plain(x) for x in (saved.membership, saved.energy, saved.moment))
    workspace = dlogit, sums_1, sums_2, sums_3
    lib.tssa_bwd(causal, dout, _plain(dmembership), *tensors, *call, dw, written, ddenom_bias, *workspace)
    gradient = (dtemp.sum(0) if lib.cuda else dtemp).to(temp.dtype)
    if saved.denom_bias is None or ddenom_bias is None:
        return dw, gradient, temp.new_empty(0)
    return dw, gradient, ddenom_bias.to(saved.denom_bias.dtype)


def forward(w: Tensor, temp: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Return out, membership, the column energies c and the second moments M."""
    return _run_forward(w, temp, None, call, causal=False)


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
    saved = _Saved(w, temp, None, membership, energy, moment)
    return _run_backward(dout, dmembership, saved, call, causal=False)[:2]


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: Call) -> tuple[Tensor, ...]:
    """Return out and membership of the causal form."""
    return _run_forward(w, temp, denom_bias, call, causal=True)[:2]


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
    return _run_backward(dout, dmembership, _Saved(w, temp, denom_bias, membership), call, causal=True)


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    state: State,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place.

    Kernels take the sums in float64. On a GPU a step is one launch, which reads them and writes them back.
    """
    if all(t.dtype == torch.float32 for t in state[:3]):
        wide = State(state.energy.double(), state.weighted.double(), state.mass.double(), state.lengths)
        result = decode(w, temp, denom_bias, wide, key_padding_mask)
        for held, new in zip(state[:3], wide[:3], strict=True):
            held.copy_(new)
        return result
    lib, call = library(w.device), Call(key_padding_mask)
    out, membership = _run_forward(w, temp, denom_bias, call, True, state)[:2]
    if not lib.cuda or _nchunks(lib, w, None, call, True):  # a step on a GPU counts its tokens itself
        state.lengths.add_(w.shape[2] if key_padding_mask is None else key_padding_mask.sum(1))
    return out, membership
