"""The folder of a run: one run at a time has it, and where it cannot be written, all processes end with one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from crate_kernels._core import files
from training.processes import is_first

PATIENCE = 10.0  # seconds in which a run that was killed ends


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it while the block lasts."""
    with ExitStack() as stack:
        with together(out):
            if is_first():
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.owned(out, PATIENCE))
        yield


@contextmanager
def together(place: Path) -> Iterator[None]:
    """Do the block, which writes in ``place``, in all processes; if the disk fails one, end all, and say why once.

    There is no collective in the block, or one that fails in all processes.
    """
    problem = ""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        problem = describe(place, error)
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if problem := next(filter(None, problems), ""):
        raise SystemExit(problem if is_first() else 1)


def describe(place: Path, error: BaseException) -> str:
    """Return one line that says what could not be written in a folder, and why."""
    if isinstance(error, files.InUse):
        return str(error)
    name = getattr(error, "filename", None)
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        name = next(place.glob(f"shard-{rank + 1:05}-*"), None)  # as PyTorch names what a process writes
    reason = (getattr(error, "strerror", None) or str(error)) + (f": {name}" if name else "")
    free = shutil.disk_usage(next(path for path in (place, *place.absolute().parents) if path.exists())).free / 2**20
    advice = "the same command resumes, and a smaller --keep deletes older checkpoints first"
    return f"{place} cannot be written: {reason}; {free:.0f} MiB are free; {advice}"


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
