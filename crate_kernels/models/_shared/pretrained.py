"""Save and load a model's folder: ``config.json`` and ``model.safetensors``.

transformers writes the same folder for these models, with fields of its own in the config; its weights may be
sharded over several files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from crate_kernels._core import files
from crate_kernels.models._shared import official
from crate_kernels.nn import _heads

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # which file has which weight, of a sharded model
_TYPE = "model_type"
_ARCHITECTURES = "architectures"  # the class that transformers has for the model
_OTHERS = "transformers_version"  # in every config that transformers writes


class Configured(nn.Module):
    """A module made from a config alone.

    Attributes:
        config_class: the dataclass of its config.
        config: the config that it was made from.
        task: end of the name of the class that transformers has for the model; None if it has none.
    """

    task: str | None = None
    config_class: type[Any]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self._name = type(self).__name__  # fully_shard changes the class of the model


Model = TypeVar("Model", bound="Configured")


def _whole_weights(model: Configured, given: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Return the weights to save; none of them may be sharded."""
    if given is not None:
        official.check("save_pretrained", model._name, model, given)
    state = model.state_dict() if given is None else given
    sharded = [name for name, tensor in state.items() if _heads.is_sharded(tensor)]
    if sharded:
        raise ValueError(
            f"save_pretrained: weights must be whole, got {len(sharded)} sharded ones, {sharded[0]} the first. Gather "
            "them in all processes, state = torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and save them in one, "
            "model.save_pretrained(folder, state_dict=state)"
        )
    return state


def save(model: Configured, folder: Path, state_dict: Mapping[str, Tensor] | None) -> Path:
    """Write a model without its ``backend``: the next machine may have a better one."""
    from safetensors.torch import save_file  # all else runs in a checkout without safetensors

    weights = _whole_weights(model, state_dict)
    config = {name: value for name, value in asdict(model.config).items() if name != "backend"}
    folder.mkdir(parents=True, exist_ok=True)
    first = official.first_names(model)
    state = {name: tensor.contiguous() for name, tensor in weights.items() if first[name] == name}
    with files.replacing(folder / WEIGHTS) as path:
        save_file(state, path, {"format": "pt"})
    classes = {_ARCHITECTURES: [model._name + model.task]} if model.task else {}
    text = json.dumps({_TYPE: model._name, **classes, **config}, indent=2) + "\n"
    files.put(folder / CONFIG, text.encode())
    return folder


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the class name and the config fields in a folder."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"from_pretrained: {path} must be JSON, {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get(_TYPE), str):
        raise ValueError(f"from_pretrained: {path} must be an object with a {_TYPE!r}")
    config.pop(_ARCHITECTURES, None)
    return config.pop(_TYPE), config


def _build(model_class: type[Model], path: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Model:
    """Build the model of a config file, with the fields in ``overrides`` changed."""
    known = fields(model_class.config_class)
    if _OTHERS in config:
        config = {field.name: config[field.name] for field in known if field.name in config}
    required = [field.name for field in known if field.default is MISSING]
    given = official.arguments("from_pretrained", {**config, **overrides}, [field.name for field in known], required)
    try:
        return model_class(model_class.config_class(**given))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        changed = f" with {', '.join(overrides)} given" if overrides else ""
        raise kind(f"from_pretrained: {path}{changed}: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the file of a folder's weights, or the files that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"from_pretrained: {folder} must hold {WEIGHTS} or {INDEX}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"from_pretrained: {folder / INDEX} must be JSON with a weight_map, {error!r}") from None
    elsewhere = [name for name in names if Path(name).name != name]
    if elsewhere:
        raise ValueError(
            f"from_pretrained: weight_map must name files of the folder, got {', '.join(elsewhere)} in {folder / INDEX}"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"from_pretrained: {folder} must hold {', '.join(missing)}, which {INDEX} names")
    return [folder / name for name in names]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"from_pretrained: {path} must be a whole safetensors file, {error}") from None


def load(model_class: type[Model], folder: Path, overrides: Mapping[str, Any]) -> Model:
    """Build the model of a folder, which must be a ``model_class``, and load its weights strictly."""
    name, config = read_config(folder)
    if name != model_class.__name__:
        raise ValueError(f"from_pretrained: {folder / CONFIG} must be of a {model_class.__name__}, got {name}")
    parts = _weight_files(folder)
    model = _build(model_class, folder / CONFIG, config, overrides)
    state = {name: tensor for part in parts for name, tensor in _read_weights(part).items()}
    tied = {name: state[first] for name, first in official.first_names(model).items() if first in state}
    return official.load(name, model, {**state, **tied}, owner="from_pretrained")
