"""Checkpoints from which a training can resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from crate_kernels._core.files import put
from crate_kernels.models._shared.official import first_names


class Unusable(Exception):
    """A checkpoint from which this run cannot resume; the message says why."""


def save_state(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    history: dict[str, torch.Tensor],
    identity: dict[str, Any],
) -> Path:
    """Write model, optimiser, history and ``identity``, which a resuming run must share."""
    first = first_names(model)  # save a tied head once, as the embedding
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if first[name] == name}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    tensors |= {f"history.{name}": value for name, value in history.items()}
    return put(path, serialize(tensors, {"run": json.dumps(identity)}))


def load_state(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> dict[str, torch.Tensor] | None:
    """Load model and optimiser from a file; return its history, or None if there is no file.

    Raises:
        Unusable: the file cannot be read, or is of another run. Model and optimiser are then unchanged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            run = json.loads((file.metadata() or {})["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise Unusable(f"{path} cannot be read ({error})") from None
    mine = json.loads(json.dumps(identity))  # tuples become lists, as in the file
    differing = [f"{key} {run.get(key)!r}, now {mine[key]!r}" for key in mine if run.get(key) != mine[key]]
    if differing:
        raise Unusable(f"{path} is of a run with other settings ({'; '.join(differing)})")
    weights = _under("model.", tensors)
    model.load_state_dict({name: weights[first] for name, first in first_names(model).items()})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _under("optimizer.", tensors).items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return _under("history.", tensors)


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
