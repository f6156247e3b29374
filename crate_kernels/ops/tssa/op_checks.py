"""Checks the tensors of kernels in Python; csrc/tssa/op_checks.h checks those of kernels in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import op_checks, operator
from crate_kernels.ops.tssa.call import State, TSSACall

_BACKWARD = "tssa backward"


def _parameter(name: str, label: str, value: Tensor, w: Tensor, shape: tuple[int, ...]) -> None:
    """Require a parameter of w's dtype, or float32."""
    dtype = torch.float32 if value is not None and value.dtype == torch.float32 else w.dtype
    op_checks.tensor(name, label, value, dtype, shape, w.device)


def _inputs(name: str, w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall, tokens: int = -1) -> None:
    """Check tokens, options and parameters; a bias covers ``tokens``, by default those of a sequence."""
    op_checks.options(name, w, call.key_padding_mask, call.cu_seqlens, call.seed)
    _parameter(name, "temp", temp, w, (w.shape[1],))
    if denom_bias is None:
        return
    if tokens < 0:
        tokens = call.max_seqlen if call.packed else w.shape[2]
    covered = denom_bias.shape[1] if denom_bias.dim() == 2 else 0
    _parameter(name, "denom_bias", denom_bias, w, (w.shape[1], max(covered, tokens)))


def _rows(w: Tensor, call: TSSACall) -> tuple[torch.dtype, tuple[int, ...], torch.device]:
    """Return what numbers by head and token must be."""
    shape = (w.shape[1], w.shape[0]) if call.packed else w.shape[:3]
    return operator.stat_dtype(w.dtype), shape, w.device


def _gradients(dout: Tensor, dmembership: Tensor | None, w: Tensor, membership: Tensor, call: TSSACall) -> None:
    rows = _rows(w, call)
    op_checks.tensor(_BACKWARD, "dout", dout, w.dtype, w.shape, w.device)
    op_checks.tensor(_BACKWARD, "membership", membership, *rows)
    if dmembership is not None:
        op_checks.tensor(_BACKWARD, "dmembership", dmembership, *rows)


def forward(w: Tensor, temp: Tensor, call: TSSACall) -> None:
    """Check the tensors of a forward of the full form."""
    _inputs("tssa", w, temp, None, call)


def backward(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    membership: Tensor,
    energy: Tensor,
    moment: Tensor,
    call: TSSACall,
) -> None:
    """Check the tensors of a backward of the full form."""
    _inputs(_BACKWARD, w, temp, None, call)
    _gradients(dout, dmembership, w, membership, call)
    channels = (call.nsequences(w), w.shape[1], w.shape[-1])
    op_checks.tensor(_BACKWARD, "energy", energy, operator.stat_dtype(w.dtype), channels, w.device)
    op_checks.tensor(_BACKWARD, "moment", moment, operator.stat_dtype(w.dtype), channels, w.device)


def forward_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall) -> None:
    """Check the tensors of a forward of the causal form."""
    _inputs("tssa", w, temp, denom_bias, call)
    _distance("tssa", call)


def backward_causal(
    dout: Tensor,
    dmembership: Tensor | None,
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    membership: Tensor,
    call: TSSACall,
) -> None:
    """Check the tensors of a backward of the causal form, but for saved sums."""
    _inputs(_BACKWARD, w, temp, denom_bias, call)
    _gradients(dout, dmembership, w, membership, call)


def saved_sums(sums: Tensor, w: Tensor, call: TSSACall) -> None:
    """Check the sums that a causal forward saved: those that ``call`` says, or none."""
    _distance(_BACKWARD, call)
    shape = sums.shape if sums is not None and not sums.numel() else call.sums_shape(w)
    op_checks.tensor(_BACKWARD, "sums", sums, operator.stat_dtype(w.dtype), shape, w.device)
    op_checks.contiguous(_BACKWARD, "sums", sums)


def _distance(name: str, call: TSSACall) -> None:
    """Require a distance between sums that there can be."""
    if call.sums_every < 0:
        raise ValueError(f"{name}: sums_every must be at least 0, got {call.sums_every}")


def decode(w: Tensor, temp: Tensor, denom_bias: Tensor | None, state: State, key_padding_mask: Tensor | None) -> None:
    """Check the tensors of a step with a cache."""
    _inputs("tssa", w, temp, denom_bias, TSSACall(key_padding_mask), tokens=min(w.shape[2], 1))
    batch, nheads, _, head_dim = w.shape
    dtype, device = state.energy.dtype, w.device
    if dtype != operator.stat_dtype(w.dtype):
        dtype = torch.float64
    op_checks.tensor("tssa", "cache.energy", state.energy, dtype, (batch, nheads, head_dim), device)
    op_checks.tensor("tssa", "cache.weighted", state.weighted, dtype, (batch, nheads, head_dim), device)
    op_checks.tensor("tssa", "cache.mass", state.mass, dtype, (batch, nheads), device)
    op_checks.tensor("tssa", "cache.lengths", state.lengths, torch.int32, (batch,), device)
