"""Reference models: every published size by name, and published checkpoints.

A family is a module with ``SIZES`` (name -> frozen config), ``Config``, ``Model`` and ``SYSTEMS`` (name ->
how to read its published checkpoints).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models import aot, crate, crate_alpha, crate_lm, crate_mae, crate_mae_encoder, redunet, tost, tost_lm
from crate_kernels.models._shared import modules, official, pretrained
from crate_kernels.models.crate import CRATE, CRATEConfig
from crate_kernels.models.crate_alpha import CRATEAlpha, CRATEAlphaConfig
from crate_kernels.models.crate_lm import CRATELM, CRATELMConfig
from crate_kernels.models.crate_mae import CRATEMAE, CRATEMAEConfig
from crate_kernels.models.crate_mae_encoder import CRATEMAEEncoder, CRATEMAEEncoderConfig
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
    "CRATEMAEEncoder",
    "CRATEMAEEncoderConfig",
    "ToST",
    "ToSTConfig",
    "ToSTLM",
    "ToSTLMConfig",
    "create",
    "from_official",
    "from_pretrained",
    "names",
    "to_official",
]

_FAMILIES: tuple[ModuleType, ...] = (
    crate,
    crate_alpha,
    crate_mae,
    crate_mae_encoder,
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
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SYSTEMS = {name: system for package in (*_FAMILIES, modules) for name, system in package.SYSTEMS.items()}


def names() -> tuple[str, ...]:
    """List the sizes that ``create`` knows."""
    return tuple(_OWNERS)


def create(name: str, **overrides: Any) -> nn.Module:
    """Build a published size, freshly initialised.

    Args:
        name: one of ``names()``.
        **overrides: fields of the config to change: ``num_classes=10``, ``backend="reference"``.

    Returns:
        The model, on torch's default device.

    Raises:
        ValueError: no size has that name, no field has an override's name, or a value is invalid.
        TypeError: a value of the wrong type.
    """
    if checks.text("create", "name", name) not in _OWNERS:
        guess = checks.suggestion(name, _OWNERS)
        raise ValueError(f"create: name must be one of {', '.join(_OWNERS)}, got {name!r}{guess}")
    family: Any = _OWNERS[name]
    overrides = official.arguments("create", overrides, [field.name for field in fields(family.Config)])
    return family.Model(replace(family.SIZES[name], **overrides))


def from_pretrained(folder: str | os.PathLike[str], **overrides: Any) -> nn.Module:
    """Build the model that a ``save_pretrained`` wrote, of any class.

    The folder may come from anyone: nothing in it is executed or unpickled, no link is followed out of it, and
    nothing is allocated before the names and shapes of its weights agree with its config.

    Args:
        folder: the folder that ``save_pretrained`` wrote.
        **overrides: fields of the config to change, such as ``backend`` or ``dropout``.

    Returns:
        The model, on torch's default device.

    Raises:
        FileNotFoundError: the folder lacks a file.
        ValueError: an invalid config or one of no model here, weights that do not fit it, or a damaged file.
        TypeError: a field of the wrong type.
    """
    path = checks.path("from_pretrained", "folder", folder)
    name, _ = pretrained.read_config(path)
    classes = {family.Model.__name__: family.Model for family in _FAMILIES}
    if name not in classes:
        path = path / pretrained.CONFIG
        raise ValueError(f"from_pretrained: {path}: model_type must be one of {', '.join(classes)}, got {name!r:.100}")
    return classes[name].from_pretrained(folder, **overrides)


@checks.suggesting
def from_official(
    system: str,
    state_dict: Mapping[str, Any],
    config: Mapping[str, Any] | str = _NOTHING,
    *,
    num_classes: int | None = None,
    image_size: int | Sequence[int] | None = None,
) -> nn.Module:
    """Build our model of a published system and load a published checkpoint into it, strictly.

    Args:
        system: name of the system: a model (``"crate"``, ``"crate_alpha"``, ``"crate_mae"``, its encoder alone
            ``"crate_mae_encoder"``, ``"tost_vision"``, ``"crate_lm"``, ``"crate_lm_overcomplete"``, ``"tost_lm"``), or
            an attention module alone (``"tssa_attention"``, ``"tssa_causal_attention"``). Or name of a published size,
            ``"crate_small"``.
        state_dict: the checkpoint, as ``torch.load(path, weights_only=True)`` returns it, or for CRATE-alpha what Flax
            or ``numpy.load`` do. Weights may be nested under ``state_dict``, ``model``, ``teacher``, ``model_ema`` or
            ``state_dict_ema``, taken in this order, and names may have the prefixes ``module.``, ``_orig_mod.``,
            ``model.`` or ``backbone.``. It is not changed, and shares no memory with the model.
        config: keyword arguments of the published class, or the name of a published size. With a size as ``system``,
            the arguments that differ from it; none by default. Values that checkpoints do not hold (step sizes,
            thresholds, dropout) and our own options (``backend``) may be given too.
        num_classes: outputs of a new last layer in place of the checkpoint's, whose own may be of any number or
            missing; 0 for none. By default the checkpoint's, strictly.
        image_size: size of the images, in pixels, to which learned positions are resized as by ``set_input_size``; by
            default that of the checkpoint, which the config gives.

    The logger ``crate_kernels`` says what is new, resized or left out of the checkpoint.

    Arguments that the weights do not determine are not checked. With MSSA, the number of heads is one of them:
    another number that divides the same width loads as well, but computes something else. It is therefore
    required, except in ToST, whose temperatures have one row per head. CRATE-MAE's outer norms have eps 1e-6, as in
    every published size. A class that was built without ``norm_layer`` has 1e-5: pass
    ``norm_layer=torch.nn.LayerNorm``, or ``norm_eps=1e-5``.

    Returns:
        The model, in training mode, as after its constructor.

    Raises:
        ValueError: an unknown system or argument, a missing required one, or weights that do not fit; the message
            says which sizes of the config would, or lists all of these weights.
        TypeError: an argument of the wrong type.
    """
    size: dict[str, Any] = {}
    if checks.text("from_official", "system", system) in _OWNERS:
        system, size = _published(system)
    if system not in _SYSTEMS:
        known = ", ".join(_SYSTEMS)
        guess = checks.suggestion(system, (*_SYSTEMS, *_OWNERS))
        raise ValueError(f"from_official: system must be one of {known}, or a size's name, got {system!r}{guess}")
    if isinstance(config, str):
        owner, size = _published(config)
        if owner != system:
            raise ValueError(f"from_official: config must be a size of {system}, got {config} of {owner}")
        config = _NOTHING
    if num_classes is not None:
        checks.integer("from_official", "num_classes", num_classes, minimum=0)
    return _SYSTEMS[system].load(system, state_dict, config, size, num_classes, image_size)


def _published(name: str) -> tuple[str, dict[str, Any]]:
    """Return the system of a published size and the arguments that give it."""
    if name not in _OWNERS:
        guess = checks.suggestion(name, _OWNERS)
        raise ValueError(f"from_official: config must be a mapping or one of {', '.join(_OWNERS)}, got {name!r}{guess}")
    family = _OWNERS[name]
    size = family.SIZES[name]
    for system, each in family.SYSTEMS.items():
        if all(getattr(size, field) == value for field, value in each.fixed.items()):
            return system, each.arguments_of(size)
    raise ValueError(f"from_official: no checkpoint of {name} was published")


@checks.suggesting
def to_official(model: nn.Module) -> dict[str, Tensor]:
    """Return a state_dict that the published class of a model loads strictly: the inverse of ``from_official``.

    It is ``model.state_dict()``, with shared tensors, plus the buffers of the published class: the
    causal mask of each layer of causal CRATE. Variants that no published class has (``attention="tied"``,
    ``num_classes=0``) keep our names.

    Args:
        model: a model from ``from_official``, or of the class of one of its systems.

    Raises:
        ValueError: no published class can load the model.
    """
    system = next((each for each in _SYSTEMS.values() if each.ours(model)), None)
    if system is None or system.instead:
        published = ", ".join(name for name, each in _SYSTEMS.items() if not each.instead)
        advice = "" if system is None else f": {system.instead}"
        raise ValueError(f"to_official: model must be of {published}, got {type(model).__name__}{advice}")
    return system.export(model)


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "aot", "redunet"]
