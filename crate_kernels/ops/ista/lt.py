"""Products with an addend or a gate by cuBLASLt, which reads both where they are: PyTorch's own copies an addend first.

csrc/common/lt.cpp calls the library that PyTorch has loaded. Its epilogues with a ReLU turn NaN into 0: none is taken,
so that a product with a threshold is never its. The derivative of ReLU, by a bit of each number, keeps NaN.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from crate_kernels._core import recording
from crate_kernels._native import extension

_WORKSPACE = 32 << 20  # bytes that an algorithm may use: csrc/common/lt.cpp asks for no more
_said: set[str] = set()


def serves(left: Tensor, right: Tensor, base: Tensor | None, out: Tensor, gated: bool = False) -> bool:
    """Return whether the library multiplies these; where it does not, say why, once."""
    if left.device.type == "meta" or left.dtype == torch.float32:
        return False
    reason = extension.MISSING
    if reason is None:
        with recording.unseen():
            reason = extension.library().lt_refusal(left, right, base, out, gated)
    if reason and reason not in _said:
        _said.add(reason)
        warnings.warn(f"ista: cuBLASLt does not multiply, PyTorch or Triton does: {reason}", stacklevel=2)
    return not reason


def product(
    left: Tensor, right: Tensor, base: Tensor | None, scale: float, out: Tensor, gate: Tensor | None = None
) -> None:
    """Write base + scale * left @ right to ``out``; 0 where a bit of ``gate``, one for each number, is 0."""
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=out.device)
    extension.library().lt_product(left, right, base, gate, workspace, scale, out)
