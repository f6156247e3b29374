"""What our modules do with a symbol of ``torch.fx``: they are leaves, for their checks and operators need a tensor."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy

__all__ = ["Proxy", "leaf", "refuse"]


def leaf(module: nn.Module, x: Proxy, *others: Any) -> Any:
    """Record a call of ``module`` in the graph that is traced, in the place of what is inside it."""
    given = [x, *others]
    while given[-1] is None or given[-1] is False:  # defaults
        given.pop()
    tracer: Any = x.tracer
    if module is tracer.root:
        raise TypeError(f"{type(module).__name__}: torch.fx must trace a module that has this one in it, as a leaf")
    return tracer.create_proxy("call_module", tracer.path_of_module(module), tuple(given), {})


def refuse(owner: str, *given: Any) -> None:
    """Refuse symbols where a whole model computes with sizes, which a symbol has not."""
    if any(isinstance(each, Proxy) for each in given):
        raise TypeError(
            f"{owner}: torch.fx cannot trace this model, whose graph depends on sizes: use torch.export, or make it a "
            "leaf of the tracer"
        )
