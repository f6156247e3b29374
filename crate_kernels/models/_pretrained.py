"""Folders that hold a model: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from crate_kernels.models import _official

if TYPE_CHECKING:
    from crate_kernels.models._base import ReferenceModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_TYPE = "model_type"
Model = TypeVar("Model", bound="ReferenceModel")


def _safetensors(owner: str) -> Any:
    """Import safetensors, which only this needs."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            f"{owner}: safetensors must be installed: pip install safetensors, or 'crate-kernels[demo]'"
        ) from None
    return safetensors.torch


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one move: until then, what was there stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def save(model: ReferenceModel, folder: Path) -> Path:
    """Write a model; ``backend`` is left out, since the next machine may have a better one."""
    library = _safetensors("save_pretrained")
    config = {name: value for name, value in asdict(model.config).items() if name != "backend"}
    folder.mkdir(parents=True, exist_ok=True)
    first = _official.first_names(model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if first[name] == name}
    _whole(folder / WEIGHTS, lambda path: library.save_file(state, path, {"format": "pt"}))
    text = json.dumps({_TYPE: type(model).__name__, **config}, indent=2) + "\n"
    _whole(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
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
    return config.pop(_TYPE), config


def load(model_class: type[Model], folder: Path, overrides: Mapping[str, Any]) -> Model:
    """Build the model of a folder, which must be of ``model_class``, and load its weights, strictly."""
    library = _safetensors("from_pretrained")
    name, config = read_config(folder)
    if name != model_class.__name__:
        raise ValueError(f"from_pretrained: {folder / CONFIG} must be of a {model_class.__name__}, got {name}")
    known = fields(model_class.config_class)
    required = [field.name for field in known if field.default is MISSING]
    config = _official.arguments("from_pretrained", {**config, **overrides}, [field.name for field in known], required)
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"from_pretrained: {folder} must hold {WEIGHTS}")
    model = model_class(model_class.config_class(**config))
    state = library.load_file(folder / WEIGHTS)
    tied = {name: state[first] for name, first in _official.first_names(model).items() if first in state}
    return _official.load(name, model, {**state, **tied}, owner="from_pretrained")
