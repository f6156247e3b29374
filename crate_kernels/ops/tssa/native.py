"""Token-statistics attention by csrc/tssa: C++ for tensors on the CPU, CUDA C++ for those on a GPU.

The kernels take tokens and gradients in any strides. Tensors without channels are small: the kernels take them
contiguous and in fp32. Both forms, and decoding, are one op forward and one backward. ``cuda`` plans the launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._cuda.launch import is_gpu
from crate_kernels._native.extension import library
from crate_kernels.ops.tssa import cuda, op_checks
from crate_kernels.ops.tssa.call import Saved, State, TSSACall
from crate_kernels.ops.tssa.sums import saved_sums


def _plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
    """Return a parameter contiguous, and in float32 if it is of ``dtype``; C++ refuses others."""
    # A fifth of the time of two calls that do nothing.
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return (x.float() if x.dtype == dtype else x).contiguous()


def _run_forward(
    w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall, causal: bool, state: State | None = None
) -> tuple[Tensor, ...]:
    """Return out, membership and energy and moment or, in the causal form, sums; without them ``state`` is advanced."""
    temp, denom_bias = _plain(temp, w.dtype), _plain(denom_bias, w.dtype)
    if is_gpu(w.device):
        return cuda.forward(w, temp, denom_bias, call, causal, state)
    out, membership = operator.empty_out(w), call.empty_membership(w)
    statistics = () if causal else (call.empty_channels(w), call.empty_channels(w))
    extra = state or (*(statistics or (None, None)), None, None)  # of a cache, or of the full form
    library().tssa_fwd(causal, w, temp, denom_bias, *call, out, membership, *extra)
    if causal and state is None:
        statistics = (saved_sums(w, membership, call),)
    return out, membership, *statistics


def _run_backward(
    dout: Tensor, dmembership: Tensor | None, saved: Saved, call: TSSACall, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    w, temp, denom_bias, membership, energy, moment, sums = saved
    dmembership = _plain(dmembership)
    results = _plain(membership), _plain(energy), _plain(moment)
    plain = Saved(w, _plain(temp, w.dtype), _plain(denom_bias, w.dtype), *results, sums)
    if is_gpu(w.device):
        dw, dtemp, dbias = cuda.backward(dout, dmembership, plain, call, causal)
    else:
        dw, dtemp = operator.empty_out(w), w.new_empty(w.shape[1], dtype=torch.float32)
        dbias = None if plain.denom_bias is None else torch.empty_like(plain.denom_bias)
        if causal:
            assert sums is not None
            op_checks.saved_sums(sums, w, call)  # which are not read
        inputs = plain.w, plain.temp, plain.denom_bias
        library().tssa_bwd(causal, dout, dmembership, *inputs, *results, *call, dw, dtemp, dbias)
    dtemp = dtemp.to(temp.dtype)
    if denom_bias is None or dbias is None:
        return dw, dtemp, temp.new_empty(0)
    return dw, dtemp, dbias.to(denom_bias.dtype)


def forward(w: Tensor, temp: Tensor, call: TSSACall) -> tuple[Tensor, ...]:
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
    call: TSSACall,
) -> tuple[Tensor, Tensor]:
    """Return dw and dtemp."""
    saved = Saved(w, temp, None, membership, energy, moment)
    return _run_backward(dout, dmembership, saved, call, causal=False)[:2]


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall) -> tuple[Tensor, ...]:
    """Return out and membership of the causal form, and the sums that ``call`` asks for."""
    return _run_forward(w, temp, denom_bias, call, causal=True)


def sums_every(w: Tensor, call: TSSACall) -> int:
    """Return how far apart a forward should save sums, as this one does and its backward reads them; 0: not at all."""
    return cuda.sums_read_every(w, call, forward_too=True) if is_gpu(w.device) else 0


def sums_read_every(w: Tensor, call: TSSACall) -> int:
    """Return how far apart a backward reads saved sums, whichever kernels saved them; 0: it reads none."""
    return cuda.sums_read_every(w, call) if is_gpu(w.device) else 0


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    sums: Tensor,
    call: TSSACall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dw, dtemp and ddenom_bias (empty without a bias)."""
    return _run_backward(dout, dmembership, Saved(w, temp, denom_bias, membership, sums=sums), call, causal=True)


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
        for stored, new in zip(state[:3], wide[:3], strict=True):
            stored.copy_(new)
        return result
    out, membership = _run_forward(w, temp, denom_bias, TSSACall(key_padding_mask), True, state)
    return out, membership
