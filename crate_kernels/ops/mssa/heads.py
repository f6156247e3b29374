"""Plans the kernels of whole heads on Hopper GPUs: csrc/mssa/cuda/head_backward.cuh.

A block keeps every token of a head in shared memory. It serves 16-bit tokens of at most 256 in a sequence and 128
channels, without a causal mask or dropout. Heads whose lse spreads further than the kernel's range are left to others.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from crate_kernels._cuda import launch
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import POINTER, Record
from crate_kernels.ops.mssa.call import Call

_HEADER = "mssa/cuda/head_backward.cuh"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MOST_ROWS, _MOST_CHANNELS = 256, 128
_CAPABILITY = 90  # wgmma is that of sm_90a alone
_SHARED = 232448  # bytes of a block
_ROW = 128  # bytes of 64 channels


class HeadTokens(Record):
    """A tensor of tokens; strides in elements."""

    cpp = "mssa::HeadTokens"
    _fields_ = (
        ("data", POINTER),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class HeadCall(Record):
    """The tensors and options of a call."""

    cpp = "mssa::HeadCall"
    _fields_ = (
        ("w", HeadTokens),
        ("g", HeadTokens),
        ("out", HeadTokens),
        ("dw", HeadTokens),
        ("lse", POINTER),
        ("dlse", POINTER),
        ("keep", POINTER),
        ("cu_seqlens", POINTER),
        ("refused", POINTER),
        ("heads", ctypes.c_int32),
        ("nheads", ctypes.c_int32),
        ("seqlen", ctypes.c_int32),
        ("total", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def shared_bytes(dim: int, rows: int, masked: bool) -> int | None:
    """Return what a block takes of shared memory, as HeadShape does; None if that is more than there is."""
    blocks, panels = min(rows // 64, 3), -(-dim // 64)
    tail = rows - 64 * blocks
    pitch = 32 if tail <= 16 else 64 if tail <= 32 else 128
    columns = -(-rows * pitch // 1024) * 1024 if tail else 0
    stage = (3 if masked else 2) * panels * rows * _ROW
    rest = blocks * panels * 64 * _ROW + 2 * columns + 2048 + 256
    return next((n * stage + rest for n in (2, 1) if n * stage + rest <= _SHARED), None)


def shape_of(seqlen: int, head_dim: int) -> tuple[int, int]:
    """Return the channels and rows of the kernel that serves sequences of at most ``seqlen`` tokens."""
    return -(-head_dim // 16) * 16, max(-(-seqlen // 16) * 16, 64)


def _kernel(dtype: torch.dtype, dim: int, rows: int, masked: bool) -> Kernel:
    return Kernel(_HEADER, f"mssa::head_backward_kernel<{_TYPES[dtype]}, {dim}, {rows}, {str(masked).lower()}>")


def _seqlen(w: Tensor, call: Call) -> int:
    return call.max_seqlen if call.packed else w.shape[2]


def _rows_are_packs(x: Tensor) -> bool:
    """Return whether every row is whole packs of 16 bytes, the channels one after another."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in (x.shape[-1], *x.stride()[:-1]))


def takes(w: Tensor, dout: Tensor | None, out: Tensor, call: Call) -> bool:
    """Return whether the kernel serves a call; the GPU is one of its kind."""
    gpu = launch.gpu(w.device)
    dim, rows = shape_of(_seqlen(w, call), w.shape[-1])
    return (
        gpu.capability == _CAPABILITY
        and gpu.shared_limit >= _SHARED - 1024
        and w.dtype in _TYPES
        and dout is not None
        and not call.causal
        and call.seed is None
        and call.threshold is None
        and dim <= _MOST_CHANNELS
        and rows <= _MOST_ROWS
        and shared_bytes(dim, rows, call.padded) is not None
        and all(map(_rows_are_packs, (w, dout, out)))
    )


def backward(dout: Tensor, dlse: Tensor | None, w: Tensor, out: Tensor, lse: Tensor, call: Call, dw: Tensor) -> Tensor:
    """Write the gradient of ``w`` to ``dw``, and return which heads are left: (heads,) uint8, 1 for each of them.

    ``lse`` and ``dlse`` are contiguous, and ``dw`` has rows of whole packs of 16 bytes.
    """
    dim, rows = shape_of(_seqlen(w, call), w.shape[-1])
    sequences = w.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    heads = sequences * w.shape[1]
    refused = torch.empty(heads, dtype=torch.uint8, device=w.device)
    bytes_ = shared_bytes(dim, rows, call.padded)
    assert bytes_ is not None
    keep = None if call.key_padding_mask is None else call.key_padding_mask.contiguous()
    parameters = HeadCall(
        w=_tokens(w, call),
        g=_tokens(dout, call),
        out=_tokens(out, call),
        dw=_tokens(dw, call),
        lse=lse,
        dlse=dlse,
        keep=keep,
        cu_seqlens=call.cu_seqlens,
        refused=refused,
        heads=heads,
        nheads=w.shape[1],
        seqlen=_seqlen(w, call),
        total=w.shape[0] if call.packed else w.shape[2],
        head_dim=w.shape[-1],
        scale=call.scale,
    )
    # A block stays on its multiprocessor and takes one head after another. Smaller heads share a multiprocessor.
    beside = max(_SHARED // (bytes_ + 1024), 1)
    blocks = min(heads, beside * launch.gpu(w.device).multiprocessors)
    shape = Shape(blocks, 128 * min(rows // 64, 3), bytes_)
    launch.run(_kernel(w.dtype, dim, rows, call.padded), shape, [parameters], w.device)
    return refused


def _tokens(x: Tensor, call: Call) -> HeadTokens:
    strides = (0, x.stride(1), x.stride(0)) if call.packed else x.stride()[:3]
    return HeadTokens(data=x, batch=strides[0], head=strides[1], row=strides[2])


def kernels() -> list[Kernel]:
    """List kernels of published sizes, of which registers are recorded; a call may need one of another length."""
    every = [(64, 208, False), (64, 208, True), (48, 208, False), (32, 208, False), (128, 208, False), (64, 64, False)]
    return [_kernel(dtype, *shape) for dtype in _TYPES for shape in (*every, (64, 256, False))]
