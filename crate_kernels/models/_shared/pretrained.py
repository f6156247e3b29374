"""Save and load a model's folder: ``config.json`` and ``model.safetensors``.

transformers writes the same folder for these models, with more fields in the config; its weights may be
sharded over several files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crate_kernels._core import checks, files
from crate_kernels.models._shared import official, preparation, reading, skeleton, vision
from crate_kernels.nn import _heads

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # which file has which weight, of a sharded model
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
_OWNER = "from_pretrained"
_TYPE = "model_type"
_ARCHITECTURES = "architectures"  # the class that transformers has for the model
_OTHERS = "transformers_version"  # in every config that transformers writes


def _of_config(init: Callable[..., None], name: str, config_class: type) -> Callable[..., None]:
    """Have a constructor refuse what is no config of its class, as the arguments of the published class."""
    wanted = f"{name}: config must be a {config_class.__name__}, got"

    @wraps(init)
    def checked(self: Any, config: Any = None, **arguments: Any) -> None:
        if arguments:
            first = next(iter(arguments))
            raise TypeError(f"{wanted} the argument {first!r}: write {name}({config_class.__name__}({first}=...))")
        if not isinstance(config, config_class):
            raise TypeError(f"{wanted} {type(config).__name__}")
        init(self, config)

    return checked


class Configured(nn.Module):
    """A module made from a config alone.

    Attributes:
        config_class: the dataclass of its config.
        config: the config that it was made from.
        task: end of the name of the class that transformers has for the model; None if it has none.
    """

    task: str | None = None
    config_class: type[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "config_class" in vars(cls):
            checks.suggesting(cls.config_class)
            cls.__init__ = _of_config(cls.__init__, cls.__name__, cls.config_class)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self._name = type(self).__name__  # fully_shard changes the class of the model


Model = TypeVar("Model", bound="Configured")


def _whole_weights(model: Configured, state_dict: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Return the weights to save; none of them may be sharded."""
    if state_dict is not None:
        official.check("save_pretrained", model._name, model, state_dict)
    state = model.state_dict() if state_dict is None else state_dict
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
    preparation.write(folder, model)
    return folder


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the class name and the config fields in a folder."""
    path = reading.inside(_OWNER, folder, CONFIG)
    config = reading.json_object(_OWNER, path, reading.MAX_TEXT)
    if not isinstance(config.get(_TYPE), str):
        raise ValueError(f"{_OWNER}: {path} must be an object with a {_TYPE!r}")
    config.pop(_ARCHITECTURES, None)
    return config.pop(_TYPE), config


def _build(
    model_class: type[Model],
    path: Path,
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    how: Callable[[Callable[[], Model]], Model],
) -> Model:
    """Build the model of a config file, with the fields in ``overrides`` changed, by ``how(its constructor)``."""
    known = fields(model_class.config_class)
    if _OTHERS in config:
        config = {field.name: config[field.name] for field in known if field.name in config}
    required = [field.name for field in known if field.default is MISSING]
    names = [field.name for field in known]
    values = official.arguments(f"{_OWNER}: {path}", {**config, **overrides}, names, required)
    try:
        return how(lambda: model_class(model_class.config_class(**values)))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # of a number that no tensor can have
        kind = TypeError if isinstance(error, TypeError) else ValueError
        changed = f" with {', '.join(overrides)} given" if overrides else ""
        first = str(error).partition("\n")[0]  # the rest of torch's messages is a stack of C++ frames
        raise kind(f"{_OWNER}: {path}{changed}: {first}") from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the file of a folder's weights, or the files that its index names."""
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        return [reading.inside(_OWNER, folder, WEIGHTS)]
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"{_OWNER}: {folder} must hold {WEIGHTS} or {INDEX}")
    names = _shards(reading.inside(_OWNER, folder, INDEX))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{_OWNER}: {folder} must hold {', '.join(missing)}, which {INDEX} names")
    return [reading.inside(_OWNER, folder, name) for name in names]


def _shards(index: Path) -> list[str]:
    """Return the names of files in an index of weights."""
    places = reading.json_object(_OWNER, index, reading.MAX_HEADER).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{_OWNER}: {index} must have a weight_map from names to names of files")
    names = sorted(set(places.values()))
    elsewhere = [name for name in names if not _SHARD.fullmatch(name)]
    if elsewhere:
        raise ValueError(
            f"{_OWNER}: weight_map must name safetensors files of the folder, got {elsewhere[0]!r:.200} in {index}"
        )
    return names


def check_links(folder: Path) -> None:
    """Refuse links and names of shards that lead out of a folder which another library will read.

    Raises:
        ValueError: there is one, or an index of weights that cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            reading.inside(_OWNER, folder, path.name)
        if path.name.endswith(".safetensors.index.json"):
            _shards(path)


def _described(parts: list[Path]) -> dict[str, Tensor]:
    """Return the tensors of a folder's files, without their values."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in reading.shapes(_OWNER, part).items():
            if name in found:
                raise ValueError(f"{_OWNER}: {part} must not have {name}, which another file has too")
            found[name] = tensor
    return found


def _with_tied(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file under all names that the model has for them."""
    return {**state, **{name: state[first] for name, first in official.first_names(model).items() if first in state}}


def _check_sizes(model: Any, path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to read another head or other positions than the saved ones, and say how to get them."""
    saved, classes = config.get("num_classes"), getattr(model.config, "num_classes", None)
    if saved not in (None, classes):
        raise ValueError(
            f"{_OWNER}: {path}: num_classes must be {saved!r:.100}, as saved, got {classes}; load it as it is and call "
            f"model.reset_classifier({classes})"
        )
    layout = getattr(model, "layout", None)
    if layout is None or not layout.fixed_size:
        return
    name, size = layout.img_size, getattr(model.config, layout.img_size)
    saved = config.get(name, size)
    if vision.pair(_OWNER, name, saved) != vision.pair(_OWNER, name, size):
        raise ValueError(
            f"{_OWNER}: {path}: {name} must be {saved!r:.100}, as saved, got {size}; load it as it is and "
            f"call model.set_input_size({size})"
        )


def load(model_class: type[Model], folder: Path, overrides: Mapping[str, Any]) -> Model:
    """Build the model of a folder, which must be a ``model_class``, and load its weights strictly.

    Names and shapes are compared before the model is built: a config alone could ask for any amount of memory.
    """
    name, config = read_config(folder)
    if name != model_class.__name__:
        raise ValueError(f"{_OWNER}: {folder / CONFIG} must be of a {model_class.__name__}, got {name}")
    parts, owner = _weight_files(folder), f"{_OWNER}: {folder}"
    described = _described(parts)
    make = partial(_build, model_class, folder / CONFIG, config, overrides)
    bare = make(lambda build: skeleton.build(build, len(described)))
    _check_sizes(bare, folder / CONFIG, config)
    official.check(owner, name, bare, _with_tied(bare, described))
    model = make(lambda build: build())
    state = {name: tensor for part in parts for name, tensor in reading.tensors(_OWNER, part)[0].items()}
    return official.load(name, model, _with_tied(model, state), owner)
