"""Complex weights as stored in files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def complex_operators(state: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with each E and C_j complex; the input may have real pairs in a last axis of 2 instead."""

    def convert(name: str, value: Any) -> Any:
        pairs = isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (2,)
        if not pairs or not name.endswith("weight"):
            return value
        return torch.view_as_complex(value.contiguous())

    return {name: convert(name, value) for name, value in state.items()}
