"""Reference models: every published size by name, and published checkpoints.

A family is a module with ``SIZES`` (name -> frozen config), ``Config``, ``Model`` and ``SYSTEMS`` (name ->
how its published checkpoints are read).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from crate_kernels.models import (
    _modules,
    _official,
    _pretrained,
    aot,
    crate,
    crate_alpha,
    crate_lm,
    crate_mae,
    redunet,
    tost,
    tost_lm,
)
from crate_kernels.models.crate import CRATE, CRATEConfig
from crate_kernels.models.crate_alpha import CRATEAlpha, CRATEAlphaConfig
from crate_kernels.models.crate_lm import CRATELM, CRATELMConfig
from crate_kernels.models.crate_mae import CRATEMAE, CRATEMAEConfig
from crate_kernels.models.tost import ToST, ToSTConfig
from crate_kernels.models.tost_lm import ToSTLM, ToSTLMConfig

__all__ = [
    "CRATE",
    "CRATELM",
    "CRATEMAE",
    "CRATEAlpha",
    "CRATEAlphaConfig",
    "CRATEConfig",
    "CRATELMConfig",
    "CRATEMAEConfig",
    "ToST",
    "ToSTConfig",
    "ToSTLM",
    "ToSTLMConfig",
    "create",
    "from_official",
    "from_pretrained",
    "names",
]

_FAMILIES: tuple[ModuleType, ...] = (
    crate,
    crate_alpha,
    crate_mae,
    tost,
    crate_lm,
    tost_lm,
    aot.vision,
    aot.language,
    aot.regression,
    redunet.vector,
    redunet.fourier1d,
    redunet.fourier2d,
)
_OWNERS: dict[str, Any] = {name: family for family in _FAMILIES for name in family.SIZES}
_SYSTEMS = {name: system for room in (*_FAMILIES, _modules) for name, system in room.SYSTEMS.items()}


def names() -> tuple[str, ...]:
    """List the sizes that ``create`` knows."""
    return tuple(_OWNERS)


def create(name: str, **overrides: Any) -> nn.Module:
    """Build a published size, freshly initialised.

    Args:
        name: one of ``names()``.
        **overrides: fields of its config to change: ``num_classes=10``, ``backend="reference"``.

    Returns:
        The model, on torch's default device.

    Raises:
        ValueError: no size has that name, no field has an override's name, or a value that cannot be.
        TypeError: a value of the wrong type.
    """
    if name not in _OWNERS:
        raise ValueError(f"create: name must be one of {', '.join(_OWNERS)}, got {name!r}")
    family: Any = _OWNERS[name]
    overrides = _official.arguments("create", overrides, [field.name for field in fields(family.Config)])
    return family.Model(replace(family.SIZES[name], **overrides))


def from_pretrained(folder: str | os.PathLike[str], **overrides: Any) -> nn.Module:
    """Build the model that a ``save_pretrained`` wrote, of whichever class it was.

    Args:
        folder: where it is.
        **overrides: fields of its config to change, such as ``backend`` or ``dropout``.

    Returns:
        The model, on torch's default device.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the folder lacks a file.
        ValueError: a config that is of no model here or cannot be, or weights that do not fit it.
    """
    name, _ = _pretrained.read_config(Path(folder))
    classes = {family.Model.__name__: family.Model for family in _FAMILIES}
    if name not in classes:
        raise ValueError(f"from_pretrained: model_type must be one of {', '.join(classes)}, got {name!r}")
    return classes[name].from_pretrained(folder, **overrides)


def from_official(system: str, state_dict: Mapping[str, Any], config: Mapping[str, Any]) -> nn.Module:
    """Build our model of a published system and load a published checkpoint into it, strictly.

    Args:
        system: which system: a model (``"crate"``, ``"crate_alpha"``, ``"crate_mae"``, ``"tost_vision"``,
            ``"crate_lm"``, ``"crate_lm_overcomplete"``, ``"tost_lm"``), or an attention module on its own
            (``"tssa_attention"``, ``"tssa_causal_attention"``).
        state_dict: the checkpoint, as ``torch.load`` gives it: weights nested under ``state_dict``,
            ``model`` or ``model_ema``, and names prefixed by ``module.`` or ``_orig_mod.``, are understood.
            It is not changed, and nothing is shared with it.
        config: keyword arguments of the published class. What checkpoints do not hold (step sizes,
            thresholds, dropout) and our own choices (``backend``) may be given beside them.

    Returns:
        The model, in training mode as a constructor leaves it.

    Raises:
        ValueError: an unknown system or argument, a required one missing, or weights that do not fit, all of
            them listed.
        TypeError: an argument of the wrong type.
    """
    if system not in _SYSTEMS:
        raise ValueError(f"from_official: system must be one of {', '.join(_SYSTEMS)}, got {system!r}")
    return _SYSTEMS[system].load(system, state_dict, config)
