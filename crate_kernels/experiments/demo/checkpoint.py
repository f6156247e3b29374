"""Save and load the training; save the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize

from crate_kernels._core.files import put
from crate_kernels.experiments.common.checkpoints import Unusable, load_state, save_state
from crate_kernels.experiments.demo.training import Training

__all__ = ["NAME", "Unusable", "resume", "save", "save_model"]

NAME = "checkpoint.safetensors"


def _identity(training: Training) -> dict[str, Any]:
    """Return the values that two runs must share for one to resume the other."""
    return {**asdict(training.settings), "digits": training.digits.name, "backend": training.fused}


def save(training: Training, folder: Path) -> Path:
    """Write model, optimiser and history; return the path."""
    history = {
        "losses": torch.tensor(training.losses, dtype=torch.float64),
        "accuracies": torch.tensor(training.accuracies, dtype=torch.float64).reshape(-1, 2),
    }
    return save_state(folder / NAME, training.model, training.optimizer, history, _identity(training))


def resume(training: Training, folder: Path) -> bool:
    """Load ``training`` from its checkpoint; return whether there was one.

    Raises:
        Unusable: the checkpoint cannot be read, or is of another run. ``training`` is then unchanged.
    """
    history = load_state(folder / NAME, training.model, training.optimizer, _identity(training))
    if history is None:
        return False
    training.losses = history["losses"].tolist()
    training.accuracies = [(int(step), accuracy) for step, accuracy in history["accuracies"].tolist()]
    return True


def save_model(training: Training, folder: Path) -> Path:
    """Write the weights alone under their published names, with the config in the metadata."""
    config = {**asdict(training.config), "backend": None}  # the next machine may have a better backend
    content = serialize(training.model.state_dict(), {"config": json.dumps(config)})
    return put(folder / "crate.safetensors", content)
