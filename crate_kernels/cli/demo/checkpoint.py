"""What is on disk: whole or absent, never half-written."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from crate_kernels.cli.demo.training import Training

NAME = "checkpoint.safetensors"


class Unusable(Exception):
    """A checkpoint that this run cannot go on from; the message says why."""


def put(path: Path, content: bytes) -> Path:
    """Write a file in one move: until then, what was there stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _identity(training: Training) -> dict[str, Any]:
    """What two runs must share for one to go on where the other stopped."""
    return {**asdict(training.settings), "digits": training.digits.name, "backend": training.fused}


def save(training: Training, folder: Path) -> Path:
    """Write model, optimiser and history; return the path."""
    tensors = {f"model.{name}": value for name, value in training.model.state_dict().items()}
    for index, state in training.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    tensors["history.losses"] = torch.tensor(training.losses, dtype=torch.float64)
    tensors["history.accuracies"] = torch.tensor(training.accuracies, dtype=torch.float64).reshape(-1, 2)
    return put(folder / NAME, serialize(tensors, {"run": json.dumps(_identity(training))}))


def resume(training: Training, folder: Path) -> bool:
    """Bring ``training`` to where its checkpoint is; return whether there was one.

    Raises:
        Unusable: it cannot be read, or is of another run. ``training`` is then as it was.
    """
    path = folder / NAME
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            run = json.loads((file.metadata() or {})["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise Unusable(f"{path} cannot be read ({error})") from None
    mine = _identity(training)
    differing = [f"{key} {run.get(key)!r}, now {mine[key]!r}" for key in mine if run.get(key) != mine[key]]
    if differing:
        raise Unusable(f"{path} is of a run with other settings ({'; '.join(differing)})")
    _restore(training, tensors)
    return True


def _restore(training: Training, tensors: dict[str, torch.Tensor]) -> None:
    training.model.load_state_dict(
        {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    )
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
    training.optimizer.load_state_dict({**training.optimizer.state_dict(), "state": state})
    training.losses = tensors["history.losses"].tolist()
    training.accuracies = [(int(step), accuracy) for step, accuracy in tensors["history.accuracies"].tolist()]


def save_model(training: Training, folder: Path) -> Path:
    """Write the weights alone under their published names, with the config in the metadata."""
    config = {**asdict(training.config), "backend": None}  # the next machine may have a better one
    content = serialize(training.model.state_dict(), {"config": json.dumps(config)})
    return put(folder / "crate.safetensors", content)
