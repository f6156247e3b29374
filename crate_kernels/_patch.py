"""Swap published modules for fused ones, in place and reversibly.

A patched module stays the same object: only its class changes, to one derived from its own whose
``forward`` calls the fused operator. Parameters, state_dict keys, hooks, optimizers, ``isinstance`` and
replicas are what they were, and ``unpatch`` gives the class back. (An instance-level ``forward`` would
stay bound to the original module in ``DataParallel``'s replicas, on another device.)

Structure only nominates a module, since CRATE-MAE's decoder looks like ISTA and is a plain product; the
probes of ``_patch_probe`` decide.
"""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels import _backend, _patch_probe
from crate_kernels import nn as fused
from crate_kernels._patch_kinds import KINDS, fusible

__all__ = ["PatchReport", "patch", "unpatch"]

_OURS = (fused.MSSA, fused.TSSA, fused.CausalMSSA, fused.CausalTSSA, fused.ISTA, fused.OvercompleteISTA)


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` did, by qualified module name; the model itself is ``""``.

    Attributes:
        replaced: the operator that each replaced module now calls.
        left: why each module that looks like one was left as it is.
    """

    replaced: Mapping[str, str]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"replaced {name or '(model)'}: {op}" for name, op in self.replaced.items()]
        lines += [f"left {name or '(model)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines) or "nothing to replace"


@dataclass(frozen=True)
class _Patch:
    """What a patched module's class remembers."""

    base: type[nn.Module]
    kind: str
    backend: str | None


def _reduce(self: nn.Module, protocol: Any) -> tuple:
    """Pickle and copy as the published class, patched again on the other side."""
    mark: _Patch = type(self)._crate_kernels  # pyright: ignore[reportAttributeAccessIssue]
    reduced: tuple[Any, ...] = mark.base.__reduce_ex__(self, max(2, protocol))  # pyright: ignore
    function, _, *state = reduced
    if function.__name__ != "__newobj__":
        raise pickle.PicklingError(f"patch: {mark.base.__name__} pickles itself; call unpatch first")
    return _rebuild, (mark,), *state


def _rebuild(mark: _Patch) -> nn.Module:
    module = mark.base.__new__(mark.base)
    module.__class__ = _class(mark)
    return module


@functools.cache
def _class(mark: _Patch) -> type[nn.Module]:
    """Derive the patched class of a published one."""
    kind, published = KINDS[mark.kind], mark.base.forward

    @functools.wraps(published)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if value is not None and value is not False]
        if len(given) == 1 and isinstance(given[0], Tensor) and fusible(self, kind, given[0]):
            return kind.run(self, given[0], mark.backend)
        return published(self, *args, **kwargs)

    body = {"forward": forward, "__reduce_ex__": _reduce, "_crate_kernels": mark, "__module__": mark.base.__module__}
    return types.new_class(f"Fused{mark.base.__name__}", (mark.base,), exec_body=lambda space: space.update(body))


def patch(model: nn.Module, *, backend: str | None = None) -> PatchReport:
    """Replace the published attention and ISTA modules of a model by fused ones, in place.

    Recognised by structure, in any model: CRATE's and CRATE-alpha's attention (MSSA), ISTA and
    overcomplete ISTA, CRATE-MAE's encoder and decoder attention, ToST's vision and causal attention
    (TSSA). A module is replaced only if a probe finds outputs and gradients equal. Parameters are shared,
    the projection still runs as a submodule, and calls that ask for more than the output
    (``return_attention=True``), or come while a hook watches a bypassed ``attend`` or ``dropout``, run the
    published forward. With dropout the masks are drawn differently. Nothing is printed.

    Args:
        model: any module; modules of ``crate_kernels`` and those patched already are left.
        backend: of the operators; default None, the best available at each call.

    Returns:
        What was replaced, and what looked like it but was left, with the reason.

    Raises:
        TypeError: ``model`` is no module, or ``backend`` no string.
        ValueError: no backend has that name.
        RuntimeError: the backend is unavailable, here or on a module's device; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a Module, got {type(model).__name__}")
    if backend is not None and backend not in _backend.names():
        known = ", ".join(_backend.names())
        raise ValueError(f"patch: backend must be None or one of {known}, got {backend!r}")
    verdicts: dict[int, tuple[nn.Module, _Patch | None, str | None]] = {}
    replaced, left, reasons = {}, {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in verdicts:
            verdicts[id(module)] = (module, *_judge(module, backend, reasons))
        _, mark, reason = verdicts[id(module)]
        if mark is not None:
            replaced[name] = mark.kind
        elif reason is not None:
            left[name] = reason
    for module, mark, _ in verdicts.values():
        if mark is not None:
            module.__class__ = _class(mark)
    return PatchReport(replaced, left)


def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Give every patched module of ``model`` its published class back.

    Returns:
        The names of the modules that were patched; none if ``patch`` was never called.

    Raises:
        RuntimeError: something derived another class from a patched one; nothing is changed then.
    """
    patched = {name: module for name, module in model.named_modules() if hasattr(type(module), "_crate_kernels")}
    for name, module in patched.items():
        if "_crate_kernels" not in vars(type(module)):
            raise RuntimeError(
                f"unpatch: {name or 'the model'} must have the class patch gave it, got {type(module).__name__}: "
                "undo what was done to it after patch first"
            )
    for module in patched.values():
        module.__class__ = vars(type(module))["_crate_kernels"].base
    return tuple(patched)


def _judge(
    module: nn.Module, backend: str | None, reasons: dict[tuple, str | None]
) -> tuple[_Patch | None, str | None]:
    """Decide on one module: how to patch it, or why not; neither if it looks like none.

    ``reasons`` keeps what the function probe found for modules of one signature.
    """
    base = type(module)
    if hasattr(base, "_crate_kernels"):
        return None, "already patched; unpatch first to change the backend"
    if isinstance(module, _OURS):
        return None, "already fused: a module of crate_kernels.nn"
    if isinstance(module, torch.jit.ScriptModule):
        return None, None
    name = next((name for name, kind in KINDS.items() if kind.fits(module)), None)
    if name is None:
        return None, None
    kind, mark = KINDS[name], _Patch(base, name, backend)
    if "forward" in vars(module):
        return None, "its forward is set on the instance, which would hide a patched one"
    extra = {*module._parameters, *module._modules} - kind.parts
    if extra:
        return None, f"looks like {name}, but has more: {', '.join(sorted(extra))}"
    odd = [child for child, known in kind.bypassed.items() if not known(module._modules.get(child))]
    if odd:
        return None, f"looks like {name}, but has another {', '.join(odd)}"
    try:
        patched = _class(mark)
    except Exception as error:  # whatever the class does when it is derived from
        return None, f"its class cannot be derived from: {error}"
    with torch.inference_mode(False):
        signature = _patch_probe.signature(module)
        if signature in reasons:
            reason = reasons[signature]
        else:
            reason = _patch_probe.same_function(module, kind)
        if signature is not None:
            reasons[signature] = reason
        reason = reason or _patch_probe.same_numbers(module, kind, backend, patched)
    return (None, reason) if reason else (mark, None)
