"""Our modules under ``torch.fx``: they are leaves of its graph, since their checks and operators need a tensor."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy

__all__ = ["Proxy", "leaf", "refuse"]


def leaf(module: nn.Module, x: Proxy, *others: Any) -> Any:
    """Record a call of ``module`` in the graph that is traced, as one node."""
    arguments = [x, *others]
    while arguments[-1] is None or arguments[-1] is False:  # defaults
        arguments.pop()
    tracer: Any = x.tracer
    if module is tracer.root:
        raise TypeError(f"{type(module).__name__}: torch.fx must trace a module that has this one in it, as a leaf")
    return tracer.create_proxy("call_module", tracer.path_of_module(module), tuple(arguments), {})


def refuse(owner: str, *inputs: Any) -> None:
    """Refuse symbols as inputs of a whole model, which computes with sizes: a symbol has none."""
    if any(isinstance(each, Proxy) for each in inputs):
        raise TypeError(
            f"{owner}: torch.fx cannot trace this model, whose graph depends on sizes: use torch.export, or make it a "
            "leaf of the tracer"
        )
