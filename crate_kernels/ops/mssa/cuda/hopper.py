"""Parameters of every kernel of sm_90a alone, and which calls they serve: csrc/mssa/cuda/head_*.cuh, long_*.cuh.

They serve 16-bit tokens of at most 128 channels, without dropout. What is out of their range they leave to the kernels
of tensor_cores.py: that is found on the GPU, which the host does not wait for.

No GPU has timed them, so nothing takes them by default. ``python -m crate_kernels tune`` times each beside what it
would replace, and has the faster one taken from then on.
"""

from __future__ import annotations

import ctypes
import math
from typing import TypeVar

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.records import POINTER, Record, fields
from crate_kernels._triton.launch import INTERPRETER
from crate_kernels._triton.table import LaunchRow, Table
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda.problem import contiguous
from crate_kernels.ops.mssa.cuda.tensor_cores import TYPES

CAPABILITY = 90  # wgmma is that of sm_90a alone
SHARED = 232448  # bytes of a block
_MAX_CHANNELS = 128


def table(name: str, option: str) -> Table:
    """Return a launch table whose rows say, by an option of 0 or 1, if a kernel takes a call that it serves."""
    row = LaunchRow({option: 0})
    return Table(name, {INTERPRETER: (row,), "sm_80": (row,)}, candidates=({option: 1},))


class HeadTokens(Record):
    """A tensor of tokens; strides in elements."""

    cpp = "mssa::HeadTokens"
    _fields_ = (("data", POINTER), *fields(ctypes.c_int64, "batch head row"))


class HeadCall(Record):
    """The tensors and options of a call."""

    cpp = "mssa::HeadCall"
    _fields_ = (
        *fields(HeadTokens, "w dout out dw"),
        *fields(POINTER, "lse dlse key_padding_mask cu_seqlens left"),
        *fields(ctypes.c_int32, "heads nheads seqlen total head_dim"),
        *fields(ctypes.c_float, "scale factor"),
    )


def seqlen_of(w: Tensor, call: MSSACall) -> int:
    """Return the longest sequence."""
    return call.max_seqlen if call.packed else w.shape[2]


def serves(w: Tensor, call: MSSACall) -> bool:
    """Return whether these kernels serve a call of some length; the GPU is one of their kind."""
    gpu = launch.gpu(w.device)
    return (
        gpu.capability == CAPABILITY
        and gpu.shared_limit >= SHARED
        and w.dtype in TYPES
        and call.scale > 0
        and call.seed is None
        and call.threshold is None
        and w.shape[-1] <= _MAX_CHANNELS
    )


def chosen(table: Table, w: Tensor, call: MSSACall) -> bool:
    """Return whether a table has a call taken."""
    config = table.config(w.device, w.shape[-1], seqlen_of(w, call), call.causal, w.dtype)
    return config == table.candidates[0]


_Call = TypeVar("_Call", bound=HeadCall)


def parameters(kind: type[_Call], w: Tensor, call: MSSACall, lse: Tensor) -> tuple[_Call, Tensor]:
    """Return the parameters of both directions, and what is left: (heads,) int32, which the kernels write."""
    sequences = w.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    heads = sequences * w.shape[1]
    left = torch.empty(heads, dtype=torch.int32, device=w.device)
    found = kind(
        w=tokens(w, call),
        lse=lse,
        key_padding_mask=contiguous(call.key_padding_mask),
        cu_seqlens=contiguous(call.cu_seqlens),
        left=left,
        heads=heads,
        nheads=w.shape[1],
        seqlen=seqlen_of(w, call),
        total=w.shape[0] if call.packed else w.shape[2],
        head_dim=w.shape[-1],
        scale=call.scale,
        factor=call.scale / math.log(2.0),
    )
    return found, left


def tokens(x: Tensor, call: MSSACall) -> HeadTokens:
    """Return a tensor of tokens as these kernels read it."""
    strides = (0, x.stride(1), x.stride(0)) if call.packed else x.stride()[:3]
    return HeadTokens(data=x, batch=strides[0], head=strides[1], row=strides[2])
