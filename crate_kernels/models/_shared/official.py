"""Load published checkpoints strictly, with one error that lists all mismatches, and export them again."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fitting

# Keys under which training scripts store the weights, and prefixes that parallel, compiled and other wrappers add.
_NESTS = ("state_dict", "model", "teacher", "model_ema", "state_dict_ema")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_BACKBONE = "backbone."  # of a larger model, whose other parts have other names

_MAX_LISTED = 8

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class System:
    """A published system: our module for it, and how to read its arguments and weights.

    Attributes:
        known: the arguments that may be given: those of the published class, and our own options.
        required: the known arguments that must be given.
        build: from the arguments to our module.
        only: arguments of the published class with a single valid value here; another value is an error.
        ignored: arguments of the published class that change nothing here.
        weights: from the published weights, under their bare names, to ours; the same by default.
        implied: from the published weights, under their bare names, to the arguments that they determine.
        translated: arguments of the published class with other names or values here: from its value to our arguments.
        ours: says if a module belongs to this system.
        buffers: from our module to the further entries of the published class's state_dict.
        fixed: fields of the config that have one value in this system.
        classifier: name of the last layer, which ``num_classes`` replaces; "" for none.
        defaults: values of the known arguments that need not be given.
        instead: what to do with a module of this system, which no published class is; "" where there is one.
    """

    known: Collection[str]
    required: Collection[str]
    build: Callable[[Mapping[str, Any]], nn.Module]
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: Collection[str] = ()
    weights: Callable[[dict[str, Any]], dict[str, Any]] = dict
    implied: Callable[[dict[str, Any]], dict[str, Any]] = lambda bare: {}
    translated: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    ours: Callable[[Any], bool] = lambda module: False
    buffers: Callable[[Any], dict[str, Tensor]] = lambda module: {}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    classifier: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""

    def load(
        self,
        name: str,
        state_dict: Mapping[str, Any],
        config: Mapping[str, Any],
        size: Mapping[str, Any],
        num_classes: int | None,
        image_size: Any,
    ) -> nn.Module:
        """Build the module of ``config``, which changes ``size``, and load ``state_dict`` into it, strictly.

        ``num_classes`` are those of a new last layer, ``image_size`` is that of other images; None keeps what is saved.
        """
        bare = unwrap(state_dict)
        implied = self.implied(bare)
        known = (*self.known, *self.only, *self.ignored, *self.translated)
        chosen = arguments(
            "from_official", config, known, [each for each in self.required if each not in {**size, **implied}]
        )
        merged = {**size, **implied, **chosen}
        for key, value in self.only.items():
            if merged.pop(key, value) != value:
                raise ValueError(f"from_official: {key} must be {value!r} for {name}, got {config[key]!r}")
        for key in merged.keys() & self.translated.keys():
            for ours, value in self.translated[key](merged.pop(key)).items():
                if merged.setdefault(ours, value) != value:
                    raise ValueError(f"from_official: {ours} must be that of {key}, {value!r}, got {merged[ours]!r}")
        settings = {k: v for k, v in merged.items() if k not in self.ignored}
        weights = self.weights(bare)
        if num_classes is None:
            model = self._loaded(name, settings, weights)
        else:
            model = self._loaded(name, {**settings, "num_classes": 0}, self._without_classifier(name, weights))
            model.reset_classifier(num_classes)
            say(f"{self.classifier} is new, of {num_classes} classes")
        if image_size is not None:
            _resize(name, model, image_size)
        return model

    def _loaded(self, name: str, settings: dict[str, Any], weights: dict[str, Any]) -> Any:
        """Return the module of these settings with these weights."""
        model = self.build(settings)
        try:
            return load(name, model, weights)
        except ValueError:
            reason = fitting.reason(self.build, settings, self.defaults, weights)
            if not reason:
                raise
        if self.classifier and "num_classes must be" in reason:
            reason += "; from_official(..., num_classes=...) makes another head"
        if re.search("ima?ge?_size must be", reason):
            reason += "; from_official(..., image_size=...) resizes the positions"
        raise ValueError(f"from_official: config does not fit the weights of this {name}: {reason}")

    def _without_classifier(self, name: str, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights without those of the last layer."""
        if not self.classifier:
            raise ValueError(f"from_official: num_classes must be None for {name}, which has no classifier")
        return without(
            weights, lambda each: each.startswith(f"{self.classifier}."), "the classifier, which is replaced"
        )

    def arguments_of(self, size: Any) -> dict[str, Any]:
        """Return the arguments that give a config, without what is as by default."""
        values = {name: getattr(size, name) for name in self.known}
        return {name: v for name, v in values.items() if name in self.required or v != self.defaults[name]}

    def export(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the state_dict of the published class for our module."""
        return {**module.state_dict(), **self.buffers(module)}


def family(
    config_class: type,
    model_class: type[nn.Module],
    *,
    fixed: Mapping[str, Any] | None = None,
    required: Collection[str] = (),
    **options: Any,
) -> System:
    """Describe a system whose arguments are the fields of a config; ``options`` are further fields of ``System``.

    Fields in ``fixed`` have that value and cannot be given. Required are fields without a default, and those that
    ``required`` names, since the weights do not determine them.
    """
    decided = fixed or {}
    known = [f for f in fields(config_class) if f.name not in decided]

    def ours(module: Any) -> bool:
        return isinstance(module, model_class) and all(getattr(module.config, k) == v for k, v in decided.items())

    return System(
        [f.name for f in known],
        [f.name for f in known if f.default is MISSING or f.name in required],
        lambda values: model_class(config_class(**values, **decided)),
        ours=ours,
        fixed=decided,
        classifier=layout.classifier if (layout := getattr(model_class, "layout", None)) else "",
        defaults={f.name: f.default for f in known if f.default is not MISSING},
        **options,
    )


def say(text: str) -> None:
    """Warn of what a loaded model has that its checkpoint has not, or the other way round."""
    logging.getLogger("crate_kernels").warning("from_official: %s", text)


def without(weights: Mapping[str, Any], dropped: Callable[[str], bool], what: str) -> dict[str, Any]:
    """Return the weights whose names are not ``dropped``, and say which those are."""
    names = [name for name in weights if dropped(name)]
    if names:
        alike = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
        listed = ", ".join(alike[:_MAX_LISTED]) + (", ..." if len(alike) > _MAX_LISTED else "")
        say(f"left out {len(names)} weights of the checkpoint, {what}: {listed}")
    return {name: weight for name, weight in weights.items() if name not in set(names)}


def unwrap(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a checkpoint, which may be nested to any depth, under their bare names, in a new dict."""
    if not isinstance(state_dict, Mapping):
        read = ": read the file by torch.load(..., weights_only=True)" if isinstance(state_dict, (str, Path)) else ""
        raise TypeError(f"from_official: state_dict must be a mapping, got {type(state_dict).__name__}{read}")
    nests = [key for key in _NESTS if isinstance(state_dict.get(key), Mapping)]
    if nests:
        if others := nests[1:]:
            say(f"took the weights under {nests[0]!r}; the checkpoint has {', '.join(map(repr, others))} too")
        return unwrap(state_dict[nests[0]])
    bare: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = str(key)
        while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        if name in bare:
            raise ValueError(f"from_official: state_dict must name each weight once, got {name} twice")
        bare[name] = value
    if not any(name.startswith(_BACKBONE) for name in bare):
        return bare
    kept = without(bare, lambda name: not name.startswith(_BACKBONE), "beside the backbone")
    return unwrap({name.removeprefix(_BACKBONE): value for name, value in kept.items()})


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state_dict to the first name of its tensor: a tied head has two."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}


def _resize(name: str, model: Any, image_size: Any) -> None:
    """Change the size of a model's images, and say what became of its positions."""
    if not hasattr(model, "set_input_size"):
        raise ValueError(f"from_official: image_size must be None for {name}, which has no images")
    old, tensors = model.grid, model.state_dict(keep_vars=True)
    model.set_input_size(image_size)
    resized = [name for name, t in model.state_dict(keep_vars=True).items() if t is not tensors[name]]
    if resized:
        before, after = (" x ".join(map(str, grid)) for grid in (old, model.grid))
        verb = "is" if len(resized) == 1 else "are"
        say(f"{' and '.join(resized)} {verb} resized, from {before} patches to {after}")


def same(value: Tensor, other: Any) -> bool:
    """Say if two entries of a checkpoint are equal; of meta tensors, which have no values, if both are."""
    if value is other or not isinstance(other, Tensor):
        return value is other
    if value.is_meta or other.is_meta:
        return value.is_meta and other.is_meta
    if value.dtype != other.dtype:  # PyTorch promotes no float8
        value, other = value.double(), other.double()
    return torch.equal(value.to(other.device), other)


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def _fault(name: str, value: Any, expected: Tensor) -> str | None:
    """Say what of a weight cannot be copied into ``expected``."""
    if not isinstance(value, Tensor):
        return f"{name} must be a Tensor, got {type(value).__name__}"
    if value.is_nested or value.layout != expected.layout or (value.is_meta and not expected.is_meta):
        layout = "nested" if value.is_nested else value.layout
        return f"{name} must be dense and hold values, got {layout} on {value.device}"
    if value.shape != expected.shape:
        return f"{name} must be {tuple(expected.shape)}, got {tuple(value.shape)}"
    if _kind(expected.dtype) not in ("integer", _kind(value.dtype)):
        return f"{name} must have a {_kind(expected.dtype)} dtype, got {value.dtype}"
    return None


def check(owner: str, system: str, model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Require weights, under their bare names, to be exactly those of ``model``; one error lists all that are not."""
    wanted, first = model.state_dict(), first_names(model)
    faults = [f"missing {name} {tuple(wanted[name].shape)}" for name in wanted if name not in weights]
    hint = ", a mapping: if it holds the weights, give it alone"
    extra = [name for name in weights if name not in wanted]
    faults += [f"unexpected {name}{hint if isinstance(weights[name], Mapping) else ''}" for name in extra]
    unfit = {name: _fault(name, weights[name], expected) for name, expected in wanted.items() if name in weights}
    for name, fault in unfit.items():
        if fault:
            faults.append(fault)
        elif (
            name != first[name] and unfit.get(first[name]) is None and not same(weights[name], weights.get(first[name]))
        ):
            faults.append(f"{name} must equal {first[name]}, which it shares here")
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{owner}: state_dict does not fit the {system} of this config:\n  {listed}")


def load(system: str, model: Model, weights: Mapping[str, Any], owner: str = "from_official") -> Model:
    """Copy weights, under their bare names, into ``model``; raise the same errors as ``check``."""
    check(owner, system, model, weights)
    model.load_state_dict(weights)
    return model


def arguments(
    owner: str, passed: Mapping[str, Any], known: Collection[str], required: Collection[str] = ()
) -> dict[str, Any]:
    """Return ``passed`` as a dict; raise if an argument is unknown or a required one is missing."""
    if not isinstance(passed, Mapping):
        raise TypeError(f"{owner}: config must be a mapping, got {type(passed).__name__}")
    unknown = [str(name) for name in passed if name not in known]
    if unknown:
        guess = checks.suggestion(unknown[0], known)
        raise ValueError(f"{owner}: arguments must be among {', '.join(known)}; got {', '.join(unknown)}{guess}")
    lacking = [name for name in required if name not in passed]
    if lacking:
        raise ValueError(f"{owner}: config must give {', '.join(lacking)}")
    return dict(passed)
