"""Checks the tensors of the passes of every backend: steps.py."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from crate_kernels._core import op_checks
from crate_kernels.ops.ista.call import OvercompleteCall


def _weight(call: str, x: Tensor, weight: Tensor) -> None:
    """Require tokens, and a dictionary of their dtype or float32."""
    op_checks.floating(call, "weight", weight, 2)
    op_checks.floating(call, "x", x, max(x.dim(), 1))
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    op_checks.tensor(call, "weight", weight, dtype, (x.shape[-1], weight.shape[1]), x.device)


def forward(x: Tensor, weight: Tensor, call: object, name: str = "ista") -> None:
    """Check the tensors of a step."""
    dtype, width = weight.dtype, x.shape[-1:]
    known = dtype in (x.dtype, torch.float32) and weight.device == x.device
    if known and weight.shape == width + width and x.is_floating_point():  # half of the time of the rest
        return
    _weight(name, x, weight)
    op_checks.tensor(name, "weight", weight, dtype, (*width, *width), x.device)


def backward(dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, *_: object) -> None:
    """Check the tensors of a step's backward."""
    forward(x, weight, None, "ista backward")
    op_checks.tensor("ista backward", "dy", dy, x.dtype, x.shape, x.device)
    op_checks.tensor("ista backward", "y", y, x.dtype, x.shape, x.device)


def forward_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, *_: object, name: str = "ista_overcomplete"
) -> None:
    """Check the tensors of some steps."""
    _weight(name, x, weight)
    if decoder is not None:
        op_checks.tensor(name, "decoder", decoder, weight.dtype, weight.shape, x.device)


def backward_overcomplete(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    decoder: Tensor | None,
    codes: Tensor,
    residuals: Tensor,
    call: OvercompleteCall,
) -> None:
    """Check the tensors of some steps' backward."""
    name = "ista_overcomplete backward"
    forward_overcomplete(x, weight, decoder, name=name)
    rows = prod(x.shape[:-1])
    op_checks.tensor(name, "dout", dout, x.dtype, x.shape, x.device)
    op_checks.tensor(name, "codes", codes, x.dtype, (call.steps, rows, weight.shape[1]), x.device)
    op_checks.tensor(name, "residuals", residuals, x.dtype, (call.steps - 1, rows, x.shape[-1]), x.device)
