"""Reading published checkpoints: unwrap them, then load every key or say all that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from torch import Tensor, nn

# Where training scripts put the weights in a checkpoint, and what parallel and compiled wrappers prepend.
_NESTS = ("state_dict", "model", "model_ema")
_PREFIXES = ("module.", "_orig_mod.")

Model = TypeVar("Model", bound=nn.Module)


def unwrap(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a checkpoint under their bare names, in a new dict.

    Args:
        state_dict: a state_dict, or a checkpoint that holds one under ``state_dict``, ``model`` or
            ``model_ema`` (the first of these it has), nested to any depth; keys may carry ``module.`` and
            ``_orig_mod.`` in any order and number.

    Raises:
        TypeError: not a mapping.
        ValueError: two keys have the same bare name.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"from_official: state_dict must be a mapping, got {type(state_dict).__name__}")
    nested = next((state_dict[key] for key in _NESTS if isinstance(state_dict.get(key), Mapping)), None)
    if nested is not None:
        return unwrap(nested)
    bare: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = str(key)
        while prefix := next((p for p in _PREFIXES if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        if name in bare:
            raise ValueError(f"from_official: state_dict must name each weight once, got {name} twice")
        bare[name] = value
    return bare


def load(system: str, model: Model, state_dict: Mapping[str, Any]) -> Model:
    """Copy a published checkpoint into ``model``, strictly.

    Raises:
        TypeError: ``state_dict`` is not a mapping.
        ValueError: keys are missing, unexpected or of another shape; the message lists them all.
    """
    given, wanted = unwrap(state_dict), model.state_dict()
    faults = [f"missing {name} {tuple(wanted[name].shape)}" for name in wanted if name not in given]
    faults += [f"unexpected {name}" for name in given if name not in wanted]
    for name, expected in wanted.items():
        value = given.get(name, expected)
        if not isinstance(value, Tensor):
            faults.append(f"{name} must be a Tensor, got {type(value).__name__}")
        elif value.shape != expected.shape:
            faults.append(f"{name} must be {tuple(expected.shape)}, got {tuple(value.shape)}")
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"from_official: state_dict does not fit the {system} of this config:\n  {listed}")
    model.load_state_dict(given)
    return model


def settings(owner: str, config_class: type, given: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return ``given`` as fields of a config class, all required ones if ``whole``, or say what is wrong."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{owner}: config must be a mapping, got {type(given).__name__}")
    known = [field.name for field in fields(config_class)]
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise ValueError(f"{owner}: arguments must be among {', '.join(known)}; got {', '.join(unknown)}")
    lacking = [f.name for f in fields(config_class) if f.default is MISSING and f.name not in given]
    if whole and lacking:
        raise ValueError(f"{owner}: config must give {', '.join(lacking)}")
    return dict(given)
