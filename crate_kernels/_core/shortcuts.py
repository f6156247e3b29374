"""Repeats calls of the public functions that passed their checks once: a call without checks, by its plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import operator, plan

_MOST_SHORTCUTS = 4096


class _NoPlan(Exception):
    """A call that was to be repeated has no plan."""


class _Shortcut:
    """A checked call of an op: what repeats it, and what its backward needs.

    Attributes:
        entry: its options, for plans.
        function: the autograd.Function of repeated calls.
        inputs: how many tensors may have a gradient.
        call, held, backend: as ``save`` keeps them.
    """

    __slots__ = ("backend", "call", "entry", "function", "held", "inputs")

    def run(self, tensors: tuple) -> Any:
        """Return the op's results; None without a plan."""
        entry = self.entry
        if self.entry.tensors < len(tensors):
            tensors = tuple(t for t in tensors if t is not None)
        found = entry.run(*tensors, entry.number)
        first = found[0] if type(found) is tuple else found
        return None if first is None else found


def _lean(function: Any) -> type:
    """Return a twin of an autograd.Function for repeated calls: of the inputs, the held tensors, and a _Shortcut.

    Twelve arguments of an autograd.Function take as long as the rest of a call.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        shortcut, count = args[-1], args[-1].inputs
        outputs = shortcut.run(args[:-1])
        if outputs is None:
            raise _NoPlan
        held = tuple(t for t in args[count:-1] if t is not None) if shortcut.held else ()
        function.keep(ctx, args[:count], outputs, held)
        ctx.call, ctx.held, ctx.backend, ctx.arguments = shortcut.call, shortcut.held, shortcut.backend, len(args)
        ctx.inputs = count
        return outputs

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = function.backward(ctx, *grads)
        return *found[: ctx.inputs], *(None,) * (ctx.arguments - ctx.inputs)

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(function.__name__, (torch.autograd.Function,), body)


class Shortcuts:
    """The calls of a public function that passed its checks, by their options: they are repeated without checks.

    A plan serves tensors of the very dtypes, sizes, strides and devices that it was recorded for, so that nothing that
    was checked can differ; values are the caller's to look at.

    Args:
        op: the op that the public function calls, from ``define``.
        function: its autograd.Function.
        inputs: how many tensors may have a gradient.
    """

    def __init__(self, op: Any, function: Any, inputs: int) -> None:
        self._planned: plan.Planned | None = op.planned
        self._function, self._inputs = _lean(function), inputs
        self._known: dict[tuple, _Shortcut] = {}
        plan.on_forget(self._known.clear)

    def repeat(self, key: tuple, *tensors: Tensor | None) -> Any:
        """Repeat a call of these options on tensors in the op's order; None where that is not possible."""
        try:
            shortcut = self._known.get((key, *plan.settings(tensors[0])))  # pyright: ignore[reportArgumentType]
        except TypeError:  # an option that has no hash is none of ours
            return None
        if shortcut is None or not operator.is_short(tensors):
            return None
        if torch.is_grad_enabled():
            for t in tensors[: self._inputs]:
                if t is not None and t.requires_grad:
                    try:
                        return shortcut.function.apply(*tensors, shortcut)  # pyright: ignore
                    except _NoPlan:
                        return None
        return shortcut.run(tensors)

    def remember(self, key: tuple, tensors: tuple[Tensor | None, ...], call: Any, backend: str) -> None:
        """Let later calls of these options be repeated; ``tensors`` are the op's arguments before its options."""
        key = (key, *plan.settings(tensors[0]))  # pyright: ignore[reportArgumentType]
        if self._planned is None or key in self._known:
            return
        held = tuple(name for name in operator.tensor_fields(type(call)) if getattr(call, name) is not None)
        if not operator.is_short((*tensors, *(getattr(call, name) for name in held))):
            return
        entry, _ = self._planned.entry((*tensors, *call, backend))
        if entry is None:
            return
        if len(self._known) >= _MOST_SHORTCUTS:
            self._known.clear()
        made = self._known[key] = _Shortcut()
        made.entry, made.function, made.inputs, made.held, made.backend = (
            entry,
            self._function,
            self._inputs,
            held,
            backend,
        )
        made.call = call._replace(**dict.fromkeys(held)) if held else call


def may_repeat(w: Any, dropout_p: Any = 0.0, cu_seqlens: Any = None) -> bool:
    """Return whether a call may be one of ``Shortcuts``: offsets on a CPU are checked, and a seed drawn, each time."""
    if torch.compiler.is_compiling() or not isinstance(w, Tensor) or w.is_nested or not w.dim():
        return False
    if cu_seqlens is not None and not (isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cuda):
        return False
    return type(dropout_p) in (float, int) and dropout_p == 0
