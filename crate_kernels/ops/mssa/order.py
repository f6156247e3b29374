"""The order in which a call with ``backend=None`` tries the backends, where it differs from the general one.

Every kernel reads what any other saved, so a backward need not be of its forward's backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels._core import backends, measured
from crate_kernels._triton import launch
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall

_HALF = (torch.bfloat16, torch.float16)
# cpp is faster up to this many new tokens. composite/cpp time at 1024 cached tokens, one AVX-512 thread:
# fp32 and bf16 8 -> 1.1-1.3, 16 -> 0.9-1.0, 64 -> 0.8; fp16 64 -> 1.6.
_CPP_DECODE_TOKENS = 8
# sm_80, backward: with 8 warps for 64 rows, Triton's kernel makes three of its five products twice. Up to 112 channels
# it has 4 warps. The CUDA kernel pads to 128.
_WIDE_HEAD = (113, 128)


def backward(
    names: tuple[str, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    w: Tensor,
    out: Tensor,
    lse: Tensor,
    call: MSSACall,
) -> tuple[str, ...]:
    """Order the backends of a backward. A threshold takes its forward's: both must select the same weights."""
    low, high = _WIDE_HEAD
    wide = low <= w.shape[-1] <= high and w.dtype in _HALF and dout is not None and call.threshold is None
    return backends.prefer("cpp", names) if wide and launch.arch(w.device) == "sm_80" else names


def fastest(w: Tensor, causal: bool) -> str | None:
    """Return the backend that was measured to be the fastest for a call without masks; None for the usual one.

    Of PyTorch's attention, cuDNN's was timed. It adds in any order, and PyTorch leaves it out where a user wants none.
    """
    found = measured.fastest("mssa", (w.shape[-1],), w.shape[-2], causal, (w,))
    if found != "composite":
        return found
    timed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return found if timed else None


def decode(names: tuple[str, ...], w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall) -> tuple[str, ...]:
    """Order the backends of a step with a cache."""
    many = w.shape[2] > _CPP_DECODE_TOKENS and w.dtype != torch.float16
    return ("composite",) if many and names[0] == "cpp" and w.device.type == "cpu" else names
