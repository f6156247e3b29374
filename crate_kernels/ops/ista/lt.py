"""Products with an addend by cuBLASLt, which reads the addend where it is: PyTorch's own product copies it first.

csrc/common/lt.cpp calls the library that PyTorch has loaded. Its epilogues with a ReLU turn NaN into 0: none is taken.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from crate_kernels._core import recording
from crate_kernels._native import extension

_WORKSPACE = 32 << 20  # bytes that an algorithm may use: csrc/common/lt.cpp asks for no more
_said: set[str] = set()


def serves(left: Tensor, right: Tensor, base: Tensor, out: Tensor) -> bool:
    """Return whether the library multiplies these; where it does not, say why, once."""
    if left.device.type == "meta" or left.dtype == torch.float32:
        return False
    reason = extension.MISSING
    if reason is None:
        with recording.unseen():
            reason = extension.library().lt_refusal(left, right, base, out)
    if reason and reason not in _said:
        _said.add(reason)
        warnings.warn(f"ista: cuBLASLt does not multiply, PyTorch or Triton does: {reason}", stacklevel=2)
    return not reason


def product(left: Tensor, right: Tensor, base: Tensor, scale: float, out: Tensor) -> None:
    """Write base + scale * left @ right to ``out``."""
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=out.device)
    extension.library().lt_product(left, right, base, workspace, scale, out)
