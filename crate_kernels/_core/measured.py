"""What ``backend=None`` takes on GPUs that were timed: tables by the GPU's name, made from committed results.

A table has the classes of calls in which another backend than the usual one was faster, forward alone or forward and
backward. A class is an operator, a dtype, the sizes of its last axes, a length up to a power of two, and causal or not.
A call of no class, or on another GPU, takes the usual backend. ``benchmarks/choices.py`` writes the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from crate_kernels._core import autograd, files, operator

FOLDER = Path(__file__).with_name("timed")
Class = tuple[str, torch.dtype, tuple[int, ...], int, bool]
Table = Mapping[Class, Mapping[str, str]]  # backends by direction, "forward" or "both"
_tables: dict[int, Table] = {}  # by the number of the GPU, -1 for the CPU


def gpu_name(device: torch.device) -> str:
    """Return the name of a GPU; empty for another device, and where there is none."""
    there = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    return torch.cuda.get_device_name(device) if there else ""


def path_of(gpu: str) -> Path:
    """Return the file of a GPU's table."""
    return FOLDER / f"{files.plain_name(gpu)}.json"


def bucket(length: int) -> int:
    """Round a length up to a power of two."""
    return 1 << max(length - 1, 0).bit_length()


def read(gpu: str) -> Table:
    """Return the table of GPUs of this name; empty without one."""
    path, found = path_of(gpu), {}
    if gpu and path.exists():
        for row in json.loads(path.read_text(encoding="utf-8"))["classes"]:
            key = row["op"], getattr(torch, row["dtype"]), tuple(row["sizes"]), row["length"], row["causal"]
            found.setdefault(key, {})[row["direction"]] = row["backend"]
    return found


def table(tensor: Tensor) -> Table:
    """Return the table of the GPU that holds a plain tensor; an empty one for anything else."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return {}
    number = tensor.get_device()  # a device itself takes three times as long to look up
    found = _tables.get(number)
    if found is None:
        found = read(gpu_name(tensor.device))
        if tensor.device.type in ("cuda", "cpu"):  # another kind of device counts from 0 too
            _tables[number] = found
    return found


def fastest(
    op: str, sizes: tuple[int, ...], length: int, causal: bool, inputs: tuple[Tensor | None, ...]
) -> str | None:
    """Return the backend that was the fastest for calls of this class; None for the usual one.

    Args:
        op: the public function.
        sizes: of the last axes.
        length: number of tokens, of a sequence or of all.
        causal: whether the call is causal.
        inputs: what may have a gradient; the first has the dtype.
    """
    first = inputs[0]
    assert first is not None
    found = table(first).get((op, first.dtype, sizes, bucket(length), causal))
    if found is None or operator.autocast_dtype(first) not in (None, first.dtype):
        return None
    if torch._C._are_functorch_transforms_active():  # what they make of a call was not timed
        return None
    return found.get("both" if autograd.needs_grad(*inputs) else "forward")
