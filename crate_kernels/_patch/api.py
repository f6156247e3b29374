"""Swap published modules for fused ones, in place and reversibly.

A patched module stays the same object. Only its class changes: the new class is derived from the module's own,
and its ``forward`` calls the fused operator. Parameters, state_dict keys, hooks, optimizers, ``isinstance`` and
replicas do not change, and ``unpatch`` restores the class. (A ``forward`` set on the instance would
stay bound to the original module in ``DataParallel``'s replicas, on another device.)

The structure of a module only suggests an operator: CRATE-MAE's decoder looks like ISTA, but is a plain product.
The probes in ``probe`` decide.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels import nn as fused
from crate_kernels._core import backends, checks
from crate_kernels._patch import probe
from crate_kernels._patch.forms import ModuleForm
from crate_kernels._patch.kinds import readings
from crate_kernels._patch.obstacles import obstacle

_RECORDS = {
    torch.fx.GraphModule: "a graph of torch.fx or torch.export",
    torch.jit.ScriptModule: "a script or trace of torch.jit",
}
_OURS = (fused.MSSA, fused.TSSA, fused.CausalMSSA, fused.CausalTSSA, fused.ISTA, fused.OvercompleteISTA)


@dataclass(frozen=True)
class PatchReport:
    """Result of ``patch``, by qualified module name; the model itself is ``""``.

    Attributes:
        replaced: the operator that each replaced module now calls.
        left: the reason why each look-alike was not replaced. For a replaced module: the calls that still run the
            published forward because of their mask.
    """

    replaced: Mapping[str, str]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"replaced {name or '(model)'}: {op}" for name, op in self.replaced.items()]
        lines += [f"left {name or '(model)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines) or "nothing to replace"


@dataclass(frozen=True)
class _Patch:
    """How a module is patched; an attribute of its patched class."""

    base: type[nn.Module]
    form: ModuleForm
    backend: str | None


def _reduce(self: nn.Module, protocol: Any) -> tuple:
    """Pickle and copy as the published class; loading patches the module again."""
    mark: _Patch = type(self)._crate_kernels  # pyright: ignore[reportAttributeAccessIssue]
    reduced: tuple[Any, ...] = mark.base.__reduce_ex__(self, max(2, protocol))  # pyright: ignore
    function, _, *state = reduced
    if function.__name__ != "__newobj__":
        raise pickle.PicklingError(f"patch: {mark.base.__name__} pickles itself; call unpatch first")
    return _rebuild, (mark,), *state


def _rebuild(mark: _Patch) -> nn.Module:
    module = mark.base.__new__(mark.base)
    module.__class__ = _patched_class(mark)
    return module


def _refuse_script(self: nn.Module) -> nn.Module:
    """Refuse torch.jit.script: it would compile the published forward's source with this file's variables."""
    name = type(self)._crate_kernels.base.__name__  # pyright: ignore[reportAttributeAccessIssue]
    raise RuntimeError(
        f"patch: torch.jit.script does not take a patched {name}; call unpatch first, or torch.compile it"
    )


def _argument_reader(
    published: Callable, form: ModuleForm
) -> Callable[[tuple, dict[str, Any]], tuple[Tensor | None, Any]]:
    """Return a function that reads the tokens and the mask of a call.

    It returns None for the tokens where only ``published`` can answer the call. Every other argument must have its
    default, since the probes ran with the defaults.
    """
    try:
        parameters = list(inspect.signature(published).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    defaults = {p.name: p.default for p in parameters}
    mask = None if form.mask is None else form.mask.name
    mask_is_optional = mask is None or defaults[mask] is not inspect.Parameter.empty

    def read(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor | None, Any]:
        if len(args) == 1 and not kwargs and mask_is_optional:
            return (args[0] if isinstance(args[0], Tensor) else None), None
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(passed) != len(args) + len(kwargs) or not names:  # an argument passed twice, or one without a name
            return None, None
        x = passed.pop(names[0], None)
        value = passed.pop(mask, defaults[mask]) if mask is not None else None
        if mask is not None and not isinstance(value, Tensor) and mask_is_optional:
            if not _same(value, defaults[mask]):
                return None, None
            value = None
        if not isinstance(x, Tensor) or value is inspect.Parameter.empty:
            return None, None
        if not all(name in defaults and _same(other, defaults[name]) for name, other in passed.items()):
            return None, None
        return x, value

    return read


def _same(value: Any, default: Any) -> bool:
    """Say if an argument is its default. Equal is not enough: 0 == False."""
    plain = type(value) is type(default) and isinstance(value, (bool, int, float, str))
    return value is default or (plain and value == default)


@functools.cache
def _patched_class(mark: _Patch) -> type[nn.Module]:
    """Derive the patched class from a published one."""
    form, published = mark.form, mark.base.forward
    read = _argument_reader(published, form)

    @functools.wraps(published)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x, mask = read(args, kwargs)
        if x is not None and form.ready(self, x) and not torch.jit.is_tracing():  # pyright: ignore
            options = form.options(x, mask)
            if options is not None:
                return form.run(self, x, mark.backend, options)
        return published(self, *args, **kwargs)

    body = {
        "forward": forward,
        "__reduce_ex__": _reduce,
        "__prepare_scriptable__": _refuse_script,
        "_crate_kernels": mark,
        "__module__": mark.base.__module__,
    }
    return types.new_class(f"Fused{mark.base.__name__}", (mark.base,), exec_body=lambda space: space.update(body))


@checks.suggesting
def patch(model: nn.Module, *, backend: str | None = None) -> PatchReport:
    """Replace the published attention and ISTA modules of a model by fused ones, in place.

    Modules are recognised by structure, in any model: the attention of CRATE, CRATE-MAE, CRATE-alpha and causal CRATE
    (MSSA), their ISTA, plain or overcomplete, with numbers or with a learned step size and threshold, and ToST's vision
    and causal attention (TSSA). The published names and
    common other names are known. A module is replaced only if probes find equal outputs, gradients and places of
    dropout. Parameters are shared, and the projection still runs as a submodule. A call runs the published forward
    if any argument other than the tokens and a mask is not its default (``return_attention=True``), or while a
    bypassed ``attend``, ``dropout`` or ``relu`` has a hook.

    A mask argument is passed on if a probe finds that it drops keys. A query without any key then gives 0,
    where a softmax gives NaN. A mask over pairs of tokens is recognised as the causal mask only on the CPU, because
    its values must be read. Other masks run the published forward. Dropout draws other masks than the published code.
    Nothing is printed. ``torch.jit.trace`` and ``torch.fx`` record the published forward; ``torch.jit.script`` is
    refused.

    The model may be wrapped (``DataParallel``, ``DistributedDataParallel``, ``fully_shard``) or compiled, before or
    after. A module may take feature maps (batch, channels, height, width) and flatten them itself, with linear layers
    or convolutions of single pixels. A graph of ``torch.fx`` or ``torch.export`` and a script of ``torch.jit`` have
    the published operators and no modules: they are left with that reason. So is ordinary attention with projections
    of its own for query, key and value, as in a ViT. A model is patched before it is quantised, or dispatched and
    offloaded by accelerate.

    Args:
        model: any module; modules of ``crate_kernels`` and modules already patched are left as they are.
        backend: backend of the operators; default None, the best available at each call.

    Returns:
        The replaced modules, and the look-alikes that were left, with the reason.

    Raises:
        TypeError: ``model`` is not a module, or ``backend`` is not a string.
        ValueError: no backend has that name.
        RuntimeError: the backend is unavailable, here or on a module's device; then nothing is changed.
    """
    checks.module("patch", "model", model)
    if backend is not None and backend not in backends.names():
        known = ", ".join(backends.names())
        raise ValueError(f"patch: backend must be None or one of {known}, got {backend!r}")
    verdicts: dict[int, tuple[nn.Module, _Patch | None, str | None]] = {}
    replaced, left, found = {}, {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in verdicts:
            verdicts[id(module)] = (module, *_plan(module, backend, found))
        _, mark, reason = verdicts[id(module)]
        if mark is not None:
            replaced[name] = mark.form.kind
        if reason is not None:
            left[name] = reason
    for module, mark, _ in verdicts.values():
        if mark is not None:
            module.__class__ = _patched_class(mark)
    left.update(_recorded(model, replaced))
    return PatchReport(replaced, left)


def _recorded(model: nn.Module, replaced: Mapping[str, str]) -> dict[str, str]:
    """Return why the outermost recorded modules are left; a graph that calls replaced modules is not."""
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = next((text for known, text in _RECORDS.items() if isinstance(module, known)), None)
        inside = any(root == "" or name.startswith(root + ".") for root in left)
        prefix = f"{name}." if name else ""
        if kind is not None and not inside and not any(other.startswith(prefix) for other in replaced):
            left[name] = f"{kind}: what it records cannot be replaced; patch the model before it is"
    return left


@checks.suggesting
def unpatch(model: nn.Module) -> tuple[str, ...]:
    """Restore the published class of every patched module of ``model``.

    Returns:
        The names of the modules that were patched; empty if ``patch`` was never called.

    Raises:
        RuntimeError: another class was derived from a patched one; then nothing is changed.
        TypeError: ``model`` is no module.
    """
    checks.module("unpatch", "model", model)
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


def _plan(
    module: nn.Module, backend: str | None, found: dict[tuple | None, tuple[ModuleForm | None, str | None]]
) -> tuple[_Patch | None, str | None]:
    """Return how to patch one module, or why not; neither if it is not like a published one.

    ``found`` caches the probe's result per signature.
    """
    base = type(module)
    if hasattr(base, "_crate_kernels"):
        return None, "already patched; unpatch first to change the backend"
    if isinstance(module, _OURS):
        return None, "already fused: a module of crate_kernels.nn"
    if base.__module__.startswith("crate_kernels.models."):  # already calls the operators
        return None, None
    if isinstance(module, torch.jit.ScriptModule) or base is nn.Module:  # the latter only holds parts of a graph
        return None, None
    forms, reason = readings(module)
    if "forward" in vars(module) and (forms or reason):
        return None, obstacle(module) or "its forward is set on the instance, which would hide a patched one"
    if not forms:
        return None, reason
    with torch.inference_mode(False):
        try:
            signature = probe.signature(module)
        except Exception:  # a lazy parameter has no shape or bytes yet
            signature = None
        form, reason = found[signature] if signature in found else probe.find(module, forms)
        if signature is not None:
            found[signature] = form, reason
        if form is None:
            return None, obstacle(module) or reason
        mark = _Patch(base, form, backend)
        try:
            patched = _patched_class(mark)
        except Exception as error:  # __init_subclass__ may raise anything
            return None, f"its class cannot be derived from: {error}"
        reason = probe.same_numbers(module, form, backend, patched)
    if reason is not None:
        return None, reason
    if form.mask is not None and not form.mask.masks:
        return mark, f"runs its published forward with a {form.mask.name}, which is none that the operator has"
    return mark, None
