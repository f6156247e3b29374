"""Loads the C++ extension and the CUDA library where they were built: beside the package, or in the user's cache."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch  # whose libraries the extension links against

from crate_kernels import _build

_NAME = "crate_kernels._C"
# Looked for once: a call must cost no look at the disk.
PATH = _build.find()
# A CPU or ROCm PyTorch lacks what the CUDA library calls.
CUDA_PATHS = _build.find_cuda() if torch.version.cuda else ()
_cuda_loaded: list[Path] = []


def load() -> ModuleType:
    """Return the module ``_C``; loading it registers ``torch.ops.crate_kernels_C.*``."""
    module = sys.modules.get(_NAME)
    if module is None:
        if PATH is None:
            raise ImportError("crate_kernels: the C++ extension is not built; python -m crate_kernels build")
        spec = importlib.util.spec_from_file_location(_NAME, PATH)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_NAME] = module
    return module


def load_cuda() -> Path:
    """Register ``torch.ops.crate_kernels_C.cuda_*`` and return the library that has them: that of this GPU if any."""
    if not _cuda_loaded:
        if not CUDA_PATHS:
            raise ImportError("crate_kernels: the CUDA library is not built; python -m crate_kernels build")
        path = CUDA_PATHS[0]
        if len(CUDA_PATHS) > 1 and torch.cuda.is_available():
            own = "-{}{}".format(*torch.cuda.get_device_capability())
            path = next((p for p in CUDA_PATHS if own in p.name), path)
        torch.ops.load_library(path)
        _cuda_loaded.append(path)
    return _cuda_loaded[0]


def cuda_build_info() -> dict[str, str]:
    """Say how the CUDA library was compiled: sources, compiler, archs, torch_abi."""
    load_cuda()
    return _lines(torch.ops.crate_kernels_C.cuda_build_info())


def kernel_names() -> list[str]:
    """List every kernel of the CUDA library by its name in C++."""
    load_cuda()
    return sorted(torch.ops.crate_kernels_C.cuda_kernel_names().splitlines())


def kernel_attributes(name: str, threads: int = 128, shared_bytes: int = 0) -> dict[str, int]:
    """Say what a CUDA kernel takes of the current GPU.

    Args:
        name: one of ``kernel_names``.
        threads: threads of a block, 128 by default.
        shared_bytes: dynamic shared memory of a block, none by default.

    Returns:
        registers, static_shared_bytes and local_bytes (where spilled registers go) a thread or block; max_threads a
        block; ptx and binary, the architectures compiled for; blocks_per_multiprocessor of that size.

    Raises:
        RuntimeError: there is no such kernel, or no GPU.
    """
    load_cuda()
    found = _lines(torch.ops.crate_kernels_C.cuda_kernel_attributes(name, threads, shared_bytes))
    return {key: int(value) for key, value in found.items()}


def _lines(text: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in text.splitlines())
