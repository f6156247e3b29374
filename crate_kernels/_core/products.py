"""Matrix products on CPUs: by which of PyTorch's libraries, and in which dtype. Most of a model's time are products.

PyTorch takes MKL for float32, which leaves half of AVX-512 unused on AMD; oneDNN does not, but is slower elsewhere.
Tokens of 16 bits are multiplied in float32 and rounded once, where the processor has no arithmetic for them or only at
half of float32's rate. oneDNN adds a bias in bfloat16 itself, to the bits of PyTorch's copy. docs/cpu.md has the rates.
"""

from __future__ import annotations

import platform
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crate_kernels._native import extension


class Fp32Fallback(NamedTuple):
    """Rows of tokens from which products of 16 bits are faster in float32, conversions included."""

    min_rows: int  # of one product
    min_rows_large: int  # of one with a matrix that has to be fetched from the system
    min_rows_pass: int  # of an operator that converts once for several products


_ZEN_4 = 25  # AMD's family of Zen 3 and Zen 4, the latter if it has AVX-512
NUMBER_BY_NUMBER, HALF_RATE = Fp32Fallback(8, 32, 1), Fp32Fallback(64, 64, 64)


@cache
def _processor() -> str:
    """Return the vendor and the family of the processor, among other words: by Linux, and elsewhere by Python."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    with info.open() as lines:
        return "".join(islice(lines, 10))  # of the first core


def _is_made_by(vendor: str) -> bool:
    """Return whether the processor is of this vendor, as cpuid names it."""
    return vendor in _processor()


def _family() -> int:
    """Return the processor's family, 0 if it is not known."""
    found = re.search(r"family\s*:?\s*(\d+)", _processor(), re.IGNORECASE)
    return int(found[1]) if found else 0


def _fallbacks() -> dict[torch.dtype, Fp32Fallback]:
    """Return the dtypes of 16 bits that this processor multiplies more slowly than float32."""
    found = {}
    dots_alone = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    if not (_HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        found[torch.bfloat16] = NUMBER_BY_NUMBER
    elif dots_alone and _is_made_by("GenuineIntel"):
        found[torch.bfloat16] = HALF_RATE
    if not (_HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported()):
        found[torch.float16] = NUMBER_BY_NUMBER
    return found


_HAS_ONEDNN = torch.backends.mkldnn.is_available()
_FASTER = _HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_made_by("AuthenticAMD")
_library = torch.ops.mkldnn._linear_pointwise.default if _FASTER else None
_slow = _fallbacks()
# Multiplications of a product below which oneDNN costs more than it saves: 12 us per call and, between other calls,
# a start with cold caches. On a Zen 4, where it saves little, `ista` of 197 tokens of 384 channels took 1.12 to
# 1.29 ms by it and 1.01 to 1.07 by MKL.
_MIN_WORK = 1 << (25 if _family() == _ZEN_4 else 24)
_LARGE = 1 << 23  # elements of a matrix that has to be fetched from the system before it is converted
_AT_ONCE = 1024  # rows that are converted at a time: more leave the caches before they are multiplied


def fast_dtype(dtype: torch.dtype, rows: int) -> torch.dtype:
    """Return the dtype in which this processor best multiplies ``rows`` of ``dtype``: itself, or float32."""
    fallback = _slow.get(dtype)
    return dtype if fallback is None or rows < fallback.min_rows_pass else torch.float32


def may_reroute(dtype: torch.dtype) -> bool:
    """Return whether ``product`` has another way for this dtype than ``F.linear``, whatever the bias."""
    return dtype in _slow or (dtype == torch.float32 and _library is not None)


def is_small(left: Tensor, columns: int) -> bool:
    """Return whether no product of ``left`` with so many columns pays; ``should_reroute`` decides the rest."""
    return left.dtype not in _slow and (_library is None or left.numel() * columns < _MIN_WORK)


def should_reroute(left: Tensor, right: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether ``product`` is faster than ``F.linear``, which refuses what differs in dtype."""
    if left.dtype != right.dtype or (bias is not None and bias.dtype != left.dtype):
        return False
    fallback = _slow.get(left.dtype)
    if fallback is not None:
        return left.numel() >= right.shape[1] * (
            fallback.min_rows if right.numel() < _LARGE else fallback.min_rows_large
        )
    if _library is None or left.numel() * right.shape[0] < _MIN_WORK:
        return False
    enabled = bool(torch.backends.mkldnn.enabled)  # pyright: ignore[reportAttributeAccessIssue]
    copies = left.dtype == torch.bfloat16 and bias is not None and left.is_contiguous()
    return enabled and (left.dtype == torch.float32 or copies)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right^T + bias, for ``left`` (..., k) and ``right`` (n, k), rounded once."""
    if not should_reroute(left, right, bias):
        return F.linear(left, right, bias)
    if left.dtype in _slow:
        return _in_float32(left, right.float(), None if bias is None else bias.float())
    if not (right.is_contiguous() or right.t().is_contiguous()):
        right = right.contiguous()  # oneDNN takes a hundred times as long for a part of a matrix
    assert _library is not None
    if bias is None and _is_transposed(left) and _is_transposed(right) and _transposes_less(left, right):
        return _transposed(_library(_transposed(right.t()), left, None, "none", [], ""))
    return _library(_transposed(left.t()) if _is_transposed(left) else left, right, bias, "none", [], "")


def _is_transposed(matrix: Tensor) -> bool:
    """Return whether this is the transpose of rows, and `_transposed` can make rows of it."""
    return (
        extension.PATH is not None and matrix.dim() == 2 and not matrix.is_contiguous() and matrix.t().is_contiguous()
    )


def _transposed(rows: Tensor) -> Tensor:
    """Return the transpose of contiguous rows as rows."""
    out = rows.new_empty(rows.shape[::-1])
    extension.library().transpose(rows, out)
    return out


def _transposes_less(left: Tensor, right: Tensor) -> bool:
    """Return whether to transpose ``right`` and the result is less work than to transpose ``left``."""
    (m, k), n = left.shape, right.shape[0]
    return n * (k + m) < m * k


def _in_float32(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Return left @ right^T + bias of 16-bit ``left``, multiplied in float32 and rounded once."""
    if left.numel() <= 2 * _AT_ONCE * left.shape[-1]:
        return product(left.float(), right, bias).to(left.dtype)
    rows = left.reshape(-1, left.shape[-1])
    out = left.new_empty((rows.shape[0], right.shape[0]))
    for part, its_out in zip(rows.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
        its_out.copy_(product(part.float(), right, bias))
    return out.view(*left.shape[:-1], right.shape[0])
