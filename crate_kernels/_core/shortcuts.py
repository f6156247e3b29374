"""Repeats calls of the public functions that passed their checks once: a call without checks, by its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, int32, is_grad_enabled, strided
from torch.compiler import is_compiling

from crate_kernels._core import autograd, operator, plan

_MAX_SHORTCUTS = 4096


class _NoPlan(Exception):
    """A call that was to be repeated has no plan."""


class _Shortcut:
    """A checked call of an op: what repeats it, and what its backward needs.

    Attributes:
        owner: the ``Shortcuts`` that it belongs to.
        entry: its plans.
        tracked: its plans where a gradient is wanted.
        run: runs a plan like ``entry.run``, and returns only the results that the caller uses.
        results: how many they are.
        call, tensor_options, backend: as ``autograd.save`` saves them where a gradient is wanted.
        packed: place of the offsets among the call's tensors; 0 without any.
        backwards: the plans of its backward, by which inputs need a gradient, which output gradients there are, and
            settings.
        apply: repeats the call where a gradient is wanted; None before that is first so.
    """

    __slots__ = (
        "apply",
        "backend",
        "backwards",
        "call",
        "entry",
        "owner",
        "packed",
        "results",
        "run",
        "tensor_options",
        "tracked",
    )

    def fits(self, tensors: tuple) -> bool:
        """Return whether the values of the offsets fit this call's tokens, where to read them is free."""
        offsets = tensors[self.packed]
        if offsets.layout is not strided or offsets.dtype is not int32 or offsets.is_nested:
            return False
        return not offsets.is_cpu or plan.offsets_fit()(offsets, tensors[0].shape[0], self.call.max_seqlen)

    def differentiate(self, needs: tuple[bool, ...], grads: tuple, saved: tuple) -> tuple[Tensor | None, ...] | None:
        """Return the gradients of the inputs by the backward's plan; None without one."""
        first, tensors = grads[0], grads + saved
        if first is None or is_grad_enabled() or is_compiling() or not operator.is_short(tensors):
            return None
        key: Any = needs if len(grads) == 1 else (needs, tuple([g is None for g in grads]))
        if first.is_cuda and (more := plan.settings(first)):
            key = (key, more)
        try:
            entry = self.backwards[key]
        except KeyError:
            entry = self.backwards[key] = self.owner.entry_of_backward(self, needs, grads, saved)
        if entry is None:
            return None
        if entry.tensors < len(tensors):
            tensors = [t for t in tensors if t is not None]
        found = entry.run(*tensors, entry.number)
        if type(found) is not tuple:
            return None if found is None else (found,)
        return None if found[0] is None else tuple([g if need else None for g, need in zip(found, needs)])  # noqa: B905


def _apply_to_tensors(shortcut: _Shortcut) -> Callable[..., Any]:
    """Return the ``apply`` of an autograd.Function for one repeated call; it takes the call's tensors and no options.

    Twelve arguments of an autograd.Function take as long as the rest of a call. So does a result that nobody asked for.
    """
    owner, entry, results = shortcut.owner, shortcut.tracked, shortcut.results
    function, inputs = owner.function, owner.inputs
    run, number, count, save = entry.run, entry.number, entry.tensors, function.save_tensors
    whole = results == owner.results

    def forward(ctx: Any, *tensors: Tensor | None) -> Any:
        present = tensors if len(tensors) == count else [t for t in tensors if t is not None]
        outputs = run(*present, number)
        if (outputs[0] if type(outputs) is tuple else outputs) is None:
            raise _NoPlan
        if len(tensors) == inputs:
            save(ctx, tensors, outputs, ())
        else:
            save(ctx, tensors[:inputs], outputs, [t for t in tensors[inputs:] if t is not None])
        return outputs if whole else outputs[0] if results == 1 else outputs[:results]

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needs = ctx.needs_input_grad
        saved = autograd.saved_tensors(owner.name, ctx)  # once: hooks of checkpoints refuse to unpack a tensor again
        found = shortcut.differentiate(needs, grads, saved)
        if found is None:
            ctx.backend = shortcut.backend
            grads += (None,) * (owner.results - len(grads))
            found = function.gradients(
                ctx, autograd.with_tensor_options(saved, shortcut.call, shortcut.tensor_options), *grads
            )[:inputs]
        return found if len(found) == len(needs) else found + (None,) * (len(needs) - len(found))

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    repeated = type(function.__name__, (torch.autograd.Function,), body)
    # Function.apply in Python serves functorch, which is_short() leaves out.
    return super(torch.autograd.Function, repeated).apply  # pyright: ignore[reportAttributeAccessIssue]


class Shortcuts:
    """The calls of a public function that passed its checks, by their options: they are repeated without checks.

    A plan serves tensors of the very dtypes, sizes, strides and devices that it was recorded for, so that nothing that
    was checked can differ; values are the caller's to look at.

    Args:
        name: of the public function.
        op, backward: the ops that it and its derivative call, from ``define``.
        function: its autograd.Function. ``arguments`` makes those of the backward's op before its options, and
            ``gradients`` the result of ``backward`` from what was saved.
        inputs: how many tensors may have a gradient.
    """

    def __init__(self, name: str, op: Any, backward: Any, function: Any, inputs: int) -> None:
        self._planned: plan.Planned | None = op.planned
        self._planned_backward: plan.Planned | None = backward.planned
        self.name, self.inputs = name, inputs
        self.results = 0 if self._planned is None else self._planned.results
        self.function, self._known = function, {}
        plan.on_forget(self._known.clear)

    def repeat(self, key: tuple, *tensors: Tensor | None) -> Any:
        """Repeat a call of these options on tensors in the op's order; None where that is not possible.

        Returns the results that the caller uses, their number as passed to ``remember``.
        """
        first: Any = tensors[0]
        if first.is_cuda and (more := plan.settings(first)):
            key = (key, more)
        try:
            shortcut = self._known[key]
        except (KeyError, TypeError):  # an option that has no hash is none of ours
            return None
        inputs = tensors[: self.inputs]
        if not shortcut.tensor_options:
            tensors = inputs
        if not operator.is_short(tensors) or (shortcut.packed and not shortcut.fits(tensors)):
            return None
        if is_grad_enabled():
            for t in inputs:
                if t is not None and t.requires_grad:
                    if shortcut.apply is None:
                        shortcut.apply = _apply_to_tensors(shortcut)
                    try:
                        return shortcut.apply(*tensors)
                    except _NoPlan:
                        return None
        entry = shortcut.entry
        if entry.tensors < len(tensors):
            tensors = tuple([t for t in tensors if t is not None])
        found = shortcut.run(*tensors, entry.number)
        return None if type(found) is tuple and found[0] is None else found

    def draw_seed(self, key: tuple, first: Tensor) -> Tensor | None:
        """Draw the seed of a call with dropout that may be repeated; None, and none is drawn, where it can not."""
        return None if self._find(key, first) is None else operator.draw_seed(first.device)

    def _find(self, key: tuple, first: Any) -> _Shortcut | None:
        if more := plan.settings(first):
            key = (key, more)
        try:
            return self._known.get(key)
        except TypeError:  # an option that has no hash is none of ours
            return None

    def remember(
        self,
        key: tuple,
        tensors: tuple[Tensor | None, ...],
        call: Any,
        backend: str,
        results: int = 1,
        *more: Any,
        tracked: Any = None,
    ) -> None:
        """Let later calls of these options be repeated; the caller takes the first ``results`` of the op's results.

        ``tensors`` and ``more`` are the op's arguments before its options. ``tracked`` are the options where a gradient
        is wanted, if they differ: such a call may save more.
        """
        if settings := plan.settings(tensors[0]):  # pyright: ignore[reportArgumentType]
            key = (key, settings)
        if self._planned is None or key in self._known:
            return
        names = tuple(name for name in operator.tensor_fields(type(call)) if getattr(call, name) is not None)
        if not operator.is_short((*tensors, *(getattr(call, name) for name in names))):
            return
        tracked = call if tracked is None else tracked
        entry, _ = self._planned.entry((*tensors, *more, *call, backend))
        tracked_entry, _ = self._planned.entry((*tensors, *more, *tracked, backend))
        if entry is None or tracked_entry is None:
            return
        if len(self._known) >= _MAX_SHORTCUTS:
            self._known.clear()
        shortcut = self._known[key] = _Shortcut()
        shortcut.owner, shortcut.entry, shortcut.tracked, shortcut.results = self, entry, tracked_entry, results
        shortcut.tensor_options, shortcut.backend = names, backend
        shortcut.call, shortcut.backwards = tracked._replace(**dict.fromkeys(names)) if names else tracked, {}
        fields = operator.tensor_fields(type(call))
        shortcut.packed = self.inputs + fields.index("cu_seqlens") if "cu_seqlens" in names else 0
        shortcut.run, shortcut.apply = plan.runner(entry.tensors, results), None

    def entry_of_backward(
        self, shortcut: _Shortcut, needs: tuple[bool, ...], grads: tuple, saved: tuple
    ) -> plan.Entry | None:
        """Return the options of a call's backward; None where no plan may serve it."""
        if self._planned_backward is None:
            return None
        tensors, call = autograd.with_tensor_options(saved, shortcut.call, shortcut.tensor_options)
        grads += (None,) * (self.results - len(grads))
        arguments = self.function.arguments(needs, grads, tensors)
        return self._planned_backward.entry((*arguments, *call, shortcut.backend))[0]


def may_repeat(w: Any, dropout_p: Any = 0.0, cu_seqlens: Any = None) -> bool:
    """Return whether a call may be one of ``Shortcuts``."""
    if is_compiling() or not isinstance(w, Tensor) or w.is_nested or not w.dim():
        return False
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        return False
    return type(dropout_p) in (float, int)
