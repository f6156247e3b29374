"""The image models in timm's registry: importing this module registers every size of every family.

``timm.create_model("tost_tiny_12", num_classes=10)`` then works as for timm's own, with ``img_size``, ``in_chans``,
``global_pool``, ``drop_rate``, ``features_only`` and ``out_indices``, and every field of our config (``depth``,
``backend``) is an argument too. ``timm.list_models(module="timm")`` lists them, and each is a function here.

No weights are hosted. ``pretrained=True`` reads a published checkpoint, or weights saved by timm or by us, from
``pretrained_cfg_overlay={"file": path}``, and fits them to another image size, number of channels or classes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor

from crate_kernels import nn
from crate_kernels._core import checks
from crate_kernels.models import aot, crate, crate_alpha, crate_mae_encoder, tost
from crate_kernels.models._shared import official, vision
from crate_kernels.models._shared.backbone import POOLS, Classifier
from crate_kernels.models._shared.base import DropPath

__all__: list[str] = []  # timm adds the names that it registers

_PAPERS: dict[ModuleType, str] = {
    crate: "arXiv:2306.01129",
    crate_alpha: "arXiv:2405.20299",
    crate_mae_encoder: "arXiv:2404.02446",
    tost: "arXiv:2412.17810",
    aot.vision: "arXiv:2506.03790",
}
# timm has backbones alone, so there CRATE-MAE is its encoder.
_SIZES = {
    name.replace("crate_mae_encoder_", "crate_mae_"): (family, config)
    for family in _PAPERS
    for name, config in family.SIZES.items()
}


def _cfg(family: Any, config: Any) -> dict[str, Any]:
    """Return timm's description of a published size."""
    layout = family.Model.layout
    size = vision.pair("timm", "img_size", getattr(config, layout.img_size))
    return {
        "input_size": (getattr(config, layout.in_chans), *size),
        "fixed_input_size": layout.fixed_size,
        "num_classes": config.num_classes,
        "first_conv": layout.stem,
        "classifier": layout.classifier,
        "paper_ids": _PAPERS[family],
    }


default_cfgs = generate_default_cfgs({name: _cfg(*size) for name, size in _SIZES.items()})


def _build(name: str, arguments: dict[str, Any]) -> Classifier:
    """Build a size with timm's arguments, which may also be fields of the config."""
    family, config = _SIZES[name]
    model_class = family.Model
    layout = model_class.layout
    words = {"img_size": layout.img_size, "in_chans": layout.in_chans, "drop_rate": layout.drop_rate}
    changes = {words.get(key, key): value for key, value in arguments.items() if key != "global_pool"}
    if "global_pool" in arguments:
        if arguments["global_pool"] not in POOLS:
            raise ValueError(f"{name}: global_pool must be 'token', 'avg' or '', got {arguments['global_pool']!r}")
        changes["pool"] = POOLS[arguments["global_pool"]]
    size = changes.get(layout.img_size)
    if isinstance(size, (tuple, list)) and len(set(size)) == 1:  # timm has pairs alone
        changes[layout.img_size] = size[0]
    if not layout.fixed_size and changes.get("dynamic_img_size") is True:  # always so
        del changes["dynamic_img_size"]
    known = [field.name for field in fields(family.Config)]
    unknown = changes.keys() - {*known, "device", "dtype"}
    if unknown:  # timm's word for it
        guess = checks.suggestion(next(iter(unknown)), known)
        raise TypeError(
            f"{name}: arguments must be timm's or among {', '.join(known)}, got {', '.join(unknown)}{guess}"
        )
    device, dtype = changes.pop("device", None), changes.pop("dtype", None)
    with torch.device(device or torch.get_default_device()):
        model = model_class(replace(config, **changes)).to(dtype)
    model._traits = {"first_conv": None}  # _fit adapts the stem: timm takes a flattened patch for no image
    return model


def _fit(name: str, chosen: Collection[str], weights: Mapping[str, Any], model: Any) -> dict[str, Tensor]:
    """Return a checkpoint under our names, fitted to the model's image size and channels.

    Arguments that the checkpoint determines are changed in the model, unless the user chose them.

    Args:
        name: of the size.
        chosen: names of the arguments that the user passed.
        weights: as ``torch.load`` gives it, published or saved by ``save_pretrained`` or timm.
        model: our model, with what timm knows of the weights.
    """
    family, published = _SIZES[name]
    state = bare = official.unwrap(weights)
    for system in family.SYSTEMS.values():
        implied = {k: v for k, v in system.implied(bare).items() if k.endswith("eps") and k not in chosen}
        if implied:
            _set_eps(model, implied)
        state = system.weights(state)
    wanted = model.state_dict()
    for place in {"pos_embedding", "pos_embed"} & state.keys() & wanted.keys():
        state[place] = _fit_positions(
            name, getattr(published, model.layout.img_size), state[place], wanted[place], model
        )
    _fit_channels(state, wanted, model)
    return state


def _fit_positions(name: str, published: Any, positions: Tensor, wanted: Tensor, model: Any) -> Tensor:
    """Resize a checkpoint's positions (1, patches + 1, dim) to those of the model.

    ``input_size`` is what images are prepared to. In a folder that timm wrote, it is not the size that the model was
    built for; the folder's arguments say that, or have none: the published one.
    """
    patch, built = model._patch_size(), model.pretrained_model_args
    size = built.get("img_size", published) if built else model.pretrained_cfg["input_size"][1:]
    size = vision.pair(name, "img_size", size)
    old = size[0] // patch[0], size[1] // patch[1]
    if old[0] * old[1] == positions.shape[1] - 1:
        new = vision.grid(name, getattr(model.config, model.layout.img_size), patch, "img_size")
        return vision.resize_positions(positions, old, new)
    if positions.shape == wanted.shape:
        return positions
    patches = f"{positions.shape[1] - 1} patches of {patch[0]}x{patch[1]}"
    raise ValueError(
        f"{name}: input_size in pretrained_cfg_overlay must be that of the weights, {patches}, got {size[0]}x{size[1]}"
    )


def _set_eps(model: Any, implied: Mapping[str, float]) -> None:
    """Change arguments of a built model that are the eps of norms."""
    model.config = replace(model.config, **implied)
    model._model_args = {**getattr(model, "_model_args", {}), **implied}  # which timm writes into a folder
    with torch.device("meta"):
        changed = type(model)(model.config)
    for norm, wanted in zip(model.modules(), changed.modules(), strict=True):
        if isinstance(norm, torch.nn.LayerNorm):
            norm.eps = wanted.eps


def _fit_channels(state: dict[str, Tensor], wanted: Mapping[str, Tensor], model: Any) -> None:
    """Fit the stem to another number of channels: for one, their sum; for more, repeated and as bright as before.

    A gray image gives what it gave as one of equal channels. Where a norm of the pixels comes first, its weights are
    moved into the linear layer, which then gives the same.
    """
    stem, new = model.layout.stem, model.in_chans
    weight, fitting = state.get(f"{stem}.weight"), wanted[f"{stem}.weight"]
    if weight is None or weight.shape == fitting.shape or weight.dim() != fitting.dim():
        return
    flat = weight.dim() == 2  # of a flattened patch, channel last
    old = model.pretrained_cfg["input_size"][0] if flat else weight.shape[1]
    if flat and weight.shape[1] != old * math.prod(model._patch_size()):
        return  # load_state_dict names both shapes
    if flat:
        norm = stem.rpartition(".")[0] + ".1"
        state[f"{stem}.bias"] = state[f"{stem}.bias"] + weight @ state[f"{norm}.bias"]
        weight = (weight * state[f"{norm}.weight"]).unflatten(1, (-1, old)).mT
        state[f"{norm}.weight"] = torch.ones_like(wanted[f"{norm}.weight"])
        state[f"{norm}.bias"] = torch.zeros_like(wanted[f"{norm}.bias"])
    index = torch.arange(new) % old
    fitted = weight.sum(1, keepdim=True) if new == 1 else weight[:, index] * (old / new)
    state[f"{stem}.weight"] = fitted.mT.flatten(1) if flat else fitted


def _entry(name: str) -> Any:
    """Return the function that timm calls to build a size."""

    def entry(pretrained: bool = False, **kwargs: Any) -> Any:
        return build_model_with_cfg(
            lambda **arguments: _build(name, arguments),
            name,
            pretrained,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            pretrained_filter_fn=partial(_fit, name, kwargs.keys()),
            **kwargs,
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"Build a ``{name}`` with timm's arguments."
    return entry


for _name in _SIZES:
    setattr(sys.modules[__name__], _name, register_model(_entry(_name)))
# torch.fx cannot follow the checks of these: timm's tracers call them as they are.
for _module in (nn.MSSA, nn.TSSA, nn.ISTA, nn.OvercompleteISTA, aot.MHSA, crate.Patchify, crate.RateGradientStep):
    register_notrace_module(_module)
for _module in (tost.ClassAttention, tost.FourierPositions, DropPath):
    register_notrace_module(_module)
