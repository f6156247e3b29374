"""Checkpoints in folders step-N, written by all processes, which any number of processes can load.

A checkpoint is written aside. When all processes are done, LIST gets the size and hash of each file, and the folder its
name. So a folder of that name was once whole; ``newest`` checks that it still is. The files are safetensors and
JSON: loading them unpickles nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from training.folder import flush, together
from training.processes import is_first

LIST = "files.json"
GROUPS = "groups.json"  # the optimiser's numbers, such as learning rates
UNFINISHED, DELETED = "unfinished", "deleted"  # folders of what a run that is killed writes or deletes


def save(folder: Path, model: nn.Module, optimiser: Optimizer, step: int, keep: int) -> None:
    """Write the checkpoint of a step, and delete all but the last ``keep``, at least one."""
    weights, moments = get_state_dict(model, optimiser)
    try:
        _write(folder, {"model": _untied(model, weights), "optimiser": moments["state"]}, moments["param_groups"], step)
    except SystemExit:
        if is_first():
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # it would fill the disk
        raise
    tidy(folder, step, keep)


def _write(folder: Path, state: dict[str, Any], groups: Any, step: int) -> None:
    """Write a checkpoint aside, then give it its name."""
    aside = folder / UNFINISHED
    with together(aside):
        if is_first():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / GROUPS).write_text(json.dumps(groups, indent=1))
    with together(aside):
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True))
    own: dict[str, tuple[int, str]] = {}
    with together(aside):
        for path in _own(sorted(aside.iterdir())):
            flush(path)
            own[path.name] = _mark(path)
    marks = _of_all(own)
    with together(aside):
        if is_first():
            (aside / LIST).write_text(json.dumps(marks, indent=1))
            flush(aside / LIST)
            flush(aside)
            place = folder / f"step-{step}"
            _remove(place)
            aside.rename(place)
            flush(folder)


def tidy(folder: Path, step: int, keep: int) -> None:
    """Delete what killed runs left, and of the checkpoints up to a step, which is whole, all but the last ``keep``."""
    with together(folder):
        if is_first():
            for left in (UNFINISHED, DELETED):
                shutil.rmtree(folder / left, ignore_errors=True)
            for old in [found for found in steps(folder) if found <= step][keep:]:
                _remove(folder / f"step-{old}")


def steps(folder: Path) -> list[int]:
    """Return the steps of which there are checkpoints, the last first."""
    return sorted((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), reverse=True)


def newest(folder: Path) -> int | None:
    """Return the step of the last checkpoint that is whole, None if there was never one; say which are not.

    Raises:
        SystemExit: there are checkpoints, and none is whole.
    """
    found = steps(folder)
    for step in found:
        damage = _damage(folder / f"step-{step}")
        if not damage:
            return step
        if is_first():
            print(f"{folder / f'step-{step}'} is damaged and not used: {damage}", flush=True)
    if found:
        raise SystemExit(f"{folder}: none of {len(found)} checkpoints is whole; remove them to begin anew")
    return None


def load(folder: Path, step: int, model: nn.Module, optimiser: Optimizer) -> None:
    """Load the checkpoint of a step, in place."""
    place = folder / f"step-{step}"
    weights, moments = get_state_dict(model, optimiser)
    moments["param_groups"] = json.loads((place / GROUPS).read_text())
    dcp.load(
        {"model": _untied(model, weights), "optimiser": moments["state"]},
        storage_reader=dcp.HuggingFaceStorageReader(str(place)),
    )
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)


def export(folder: Path, model: Any) -> None:
    """Write the whole weights as ``save_pretrained`` does."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with together(folder.parent):
        if is_first():
            model.save_pretrained(folder, state_dict=state)


def _untied(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights, each under its first name: a tied head is the embedding."""
    named = {name for names in (model.named_parameters(), model.named_buffers()) for name, _ in names}
    return {name: weight for name, weight in weights.items() if name in named}


def _damage(place: Path) -> str:
    """Return what is wrong with a checkpoint, the same in all processes, each of which reads a part; "" if nothing."""
    try:
        marks = {
            name: (int(size), str(digest)) for name, (size, digest) in json.loads((place / LIST).read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{LIST} cannot be read ({error})"
    if others := {path.name for path in place.iterdir()} ^ {LIST, *marks}:
        return f"{LIST} and the folder differ in {', '.join(sorted(others))}"
    wrong = {}
    for name in _own(sorted(marks)):
        path, (size, digest) = place / name, marks[name]
        if not path.is_file():
            wrong[name] = f"{name} is no file"
        elif path.stat().st_size != size:
            wrong[name] = f"{name} has {path.stat().st_size} bytes instead of {size}"
        elif _mark(path)[1] != digest:
            wrong[name] = f"{name} has other bytes than were written"
    return "; ".join(_of_all(wrong).values())


def _mark(path: Path) -> tuple[int, str]:
    """Return size and hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return path.stat().st_size, digest.hexdigest()


def _own(parts: list) -> list:
    """Return this process's part of a list that all have."""
    return parts[dist.get_rank() :: dist.get_world_size()]


def _of_all(own: dict) -> dict:
    """Return the entries of all processes' dictionaries."""
    every: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: value for each in every for name, value in sorted(each.items())}


def _remove(place: Path) -> None:
    """Delete a checkpoint; it loses its name first."""
    if place.exists():
        gone = place.with_name(DELETED)
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)
        shutil.rmtree(gone)
