"""Build a model without memory, to compare it with a file before anything of the size in its config is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Model = TypeVar("Model", bound=nn.Module)

# The functions by which modules here and in torch.nn create tensors.
_CREATORS = (
    torch.arange,
    torch.empty,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.tensor,
    torch.zeros,
)


class _Meta(TorchFunctionMode):
    """Put every created tensor on the meta device, also one whose device is named, and create at most ``maximum``."""

    def __init__(self, maximum: int) -> None:
        super().__init__()
        self.left = maximum

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CREATORS:
            self.left -= 1
            if self.left < 0:
                raise ValueError("the config has more layers than the weights")
            try:
                return func(*args, **{**kwargs, "device": "meta"})
            except (RuntimeError, TypeError, OverflowError) as error:  # with a stack of C++ frames
                raise ValueError(f"no tensor has these sizes: {str(error).splitlines()[0]}") from None
        return func(*args, **kwargs)


def build(make: Callable[[], Model], tensors: int) -> Model:
    """Return ``make()`` on the meta device, a model that is to have about as many tensors as a file.

    Raises:
        ValueError: a model of far more tensors, or of sizes that no tensor can have.
    """
    with torch.device("meta"), _Meta(4 * tensors + 100):
        return make()
