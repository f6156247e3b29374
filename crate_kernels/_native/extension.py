"""Loads the C++ extension and the CUDA library from the package folder or from the user's cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch  # loads the libraries that the extension links against

from crate_kernels._native import libraries

_failures: list[str] = []


def _loads(path: Path) -> bool:
    """Register ``torch.ops.crate_kernels_C.*`` for CPU tensors; return whether this PyTorch and system can."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        _failures.append(f"the C++ extension {path} cannot be loaded: {error.__cause__ or error}")
        return False
    return True


# Searched and loaded once, at import: a call must not touch the disk, and what does not load must not be chosen.
PATH = libraries.find(_loads)
MISSING = None if PATH else (*_failures, libraries.why_missing())[0]
# The CUDA library needs a PyTorch with CUDA: CPU and ROCm builds lack functions that it calls.
CUDA_PATHS = libraries.find_cuda() if torch.version.cuda else ()


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
    return _lines(torch.ops.crate_kernels_C.cpu_build_info())


def cpu_capability() -> str:
    """Return the instruction-set level that the CPU kernels use."""
    load()
    return torch.ops.crate_kernels_C.cpu_capability()


def set_cpu_capability(level: str = "") -> None:
    """Switch to another level that this machine supports, by default to the machine's own choice. For tests."""
    load()
    torch.ops.crate_kernels_C.set_cpu_capability(level)
    torch.ops.crate_kernels_C.plan_forget()


@cache
def load_cuda() -> Path:
    """Register ``torch.ops.crate_kernels_C.cuda_*``; return their library, the one for this GPU if there is one."""
    if not CUDA_PATHS:
        raise ImportError("crate_kernels: the CUDA library is not built; python -m crate_kernels build")
    path = CUDA_PATHS[0]
    if len(CUDA_PATHS) > 1 and torch.cuda.is_available():
        own = "-{}{}".format(*torch.cuda.get_device_capability())
        path = next((p for p in CUDA_PATHS if own in p.name), path)
    torch.ops.load_library(path)
    return path


def cuda_build_info() -> dict[str, str]:
    """Return how the CUDA library was compiled: sources, compiler, archs, torch_abi."""
    load_cuda()
    return _lines(torch.ops.crate_kernels_C.cuda_build_info())


@cache
def cuda_archs() -> frozenset[str]:
    """Return the architectures that the CUDA library has machine code for, as "sm_90"; none if it cannot be loaded."""
    try:
        archs = cuda_build_info()["archs"].split("_")
    except (ImportError, OSError):  # not built; of another PyTorch or CUDA
        return frozenset()
    return frozenset(f"sm_{arch.rstrip('a')}" for arch in archs if not arch.endswith("PTX"))


def kernel_names() -> list[str]:
    """List the C++ names of all kernels of the CUDA library."""
    load_cuda()
    return sorted(torch.ops.crate_kernels_C.cuda_kernel_names().splitlines())


def kernel_attributes(name: str, threads: int = 128, shared_bytes: int = 0) -> dict[str, int]:
    """Return the resources of the current GPU that a CUDA kernel, one of ``kernel_names``, uses at a block size.

    They are registers and local_bytes (spilled registers) per thread; static_shared_bytes and max_threads per block;
    ptx and binary, the architectures of its code; and blocks_per_multiprocessor.
    """
    load_cuda()
    found = _lines(torch.ops.crate_kernels_C.cuda_kernel_attributes(name, threads, shared_bytes))
    return {key: int(value) for key, value in found.items()}


class Library:
    """The operators ``torch.ops.crate_kernels_C`` for one type of device, as attributes without the prefix of CUDA.

    Attributes:
        cuda: whether these are the operators of the CUDA library.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        load_cuda() if cuda else load()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.crate_kernels_C, f"cuda_{name}" if self.cuda else name).default
        setattr(self, name, found)
        return found


@cache
def library(device: torch.device) -> Library:
    """Return the operators for tensors on a device. Their library is loaded at the first call."""
    return Library(device.type == "cuda")


def _lines(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines())
