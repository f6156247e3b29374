"""Matrix products on CPUs: by which of PyTorch's libraries, and in which dtype. Most of a model's time are products.

PyTorch multiplies float32 by its BLAS, MKL in its builds for x86, which leaves half of the width of an AMD processor
with AVX-512 unused; oneDNN does not, and is slower elsewhere. In 16 bits, where the processor has no arithmetic for
them, PyTorch multiplies number by number, and it pays to convert. GFLOP/s of a product of (384, 384) matrices by one
thread, and of two threads for 16 bits:

============================= ==== ======= ==================== ========================
processor                     MKL  oneDNN  bfloat16, by PyTorch bfloat16, via float32
============================= ==== ======= ==================== ========================
AMD Zen 5 (AVX512-BF16)       101  226     not measured         not taken
AMD Zen 3 (AVX2)              68   51-60   2-23                 70-104
Intel Granite Rapids (AMX)    197  164-194 1310-1420            not taken
============================= ==== ======= ==================== ========================
"""

from __future__ import annotations

import platform
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


def _is_amd() -> bool:
    """Tell whether the processor is AMD's: by Linux, and elsewhere by Python."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return "AuthenticAMD" in platform.processor()
    with info.open() as lines:
        return any("AuthenticAMD" in line for line in islice(lines, 10))  # of the first core


_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_FASTER = _HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd()
_library = torch.ops.mkldnn._linear_pointwise.default if _FASTER else None
_slow = frozenset(
    {
        *(() if _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.bfloat16,)),
        *(() if _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported() else (torch.float16,)),
    }
)
_LEAST_WORK = 1 << 24  # multiplications; below, oneDNN's 12 us per call cost more than it spares
# Rows for which it pays to convert a matrix, and one that has to be fetched from the system first.
_LEAST_ROWS, _LEAST_ROWS_OF_LARGE, _LARGE = 8, 32, 1 << 23


def fast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this processor multiplies ``dtype`` best: itself, or float32."""
    return torch.float32 if dtype in _slow else dtype


def may_pay(dtype: torch.dtype) -> bool:
    """Tell whether ``product`` has another way for this dtype than ``F.linear``."""
    return dtype in _slow or (dtype == torch.float32 and _library is not None)


def pays(left: Tensor, right: Tensor) -> bool:
    """Tell whether ``product`` is faster than ``F.linear``."""
    if left.dtype != right.dtype:
        return False
    if left.dtype in _slow:
        least = _LEAST_ROWS if right.numel() < _LARGE else _LEAST_ROWS_OF_LARGE
        return left.numel() >= least * right.shape[1]
    enabled = bool(torch.backends.mkldnn.enabled)  # pyright: ignore[reportAttributeAccessIssue]
    return enabled and may_pay(left.dtype) and left.numel() * right.shape[0] >= _LEAST_WORK


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right^T + bias, for ``left`` (..., k) and ``right`` (n, k), rounded once."""
    if not pays(left, right):
        return F.linear(left, right, bias)
    if left.dtype in _slow:
        bias = None if bias is None else bias.float()
        return product(left.float(), right.float(), bias).to(left.dtype)
    if not (right.is_contiguous() or right.t().is_contiguous()):
        right = right.contiguous()  # oneDNN takes a hundred times as long for a part of a matrix
    assert _library is not None
    return _library(left, right, bias, "none", [], "")
