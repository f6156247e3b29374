"""Loads the C++ extension from the package folder or from the user's cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch  # loads the libraries that the extension links against

from crate_kernels._native import libraries

_failures: list[str] = []


def _loads(path: Path) -> bool:
    """Register ``torch.ops.crate_kernels_C.*``; return whether this PyTorch and system can."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        _failures.append(f"the C++ extension {path} cannot be loaded: {error.__cause__ or error}")
        return False
    return True


# Searched and loaded once, at import: a call must not touch the disk, and what does not load must not be chosen.
PATH = libraries.find(_loads)
MISSING = None if PATH else (*_failures, libraries.why_missing())[0]


def load() -> Path:
    """Return the path of the extension, which is loaded.

    Raises:
        ImportError: there is none.
    """
    if PATH is None:
        raise ImportError(f"crate_kernels: {MISSING}; python -m crate_kernels build")
    return PATH


def build_info() -> dict[str, str]:
    """Return how the extension was compiled: sources, compiler, standard, torch_abi, cpu_capabilities."""
    load()
    return dict(line.split(" ", 1) for line in torch.ops.crate_kernels_C.cpu_build_info().splitlines())


def cpu_capability() -> str:
    """Return the instruction-set level that the CPU kernels use."""
    load()
    return torch.ops.crate_kernels_C.cpu_capability()


def set_cpu_capability(level: str = "") -> None:
    """Switch to another level that this machine supports, by default to the machine's own choice. For tests."""
    load()
    torch.ops.crate_kernels_C.set_cpu_capability(level)
    torch.ops.crate_kernels_C.plan_forget()


class Library:
    """The operators ``torch.ops.crate_kernels_C``, for CPU tensors, as attributes."""

    def __init__(self) -> None:
        load()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.crate_kernels_C, name).default
        setattr(self, name, found)
        return found


@cache
def library() -> Library:
    """Return the operators."""
    return Library()
