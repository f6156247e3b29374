"""``build``: compile the C++ extension, and the CUDA library if there is a GPU, into the user's cache."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from crate_kernels._native import build as _build
from crate_kernels._native import compilers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="only the CUDA library, in minutes, also without a GPU, or beside a PyTorch without CUDA, which cannot "
        "load it",
    )


def run(args: argparse.Namespace) -> int:
    """Compile missing libraries; return 1 on failure, except for a CUDA library without a GPU or nvcc."""
    if args.cuda:
        return _build_and_report(_build.build_cuda_cached)
    status = _build_and_report(_build.build_cached)
    if torch.version.cuda is None:
        return status
    if not torch.cuda.is_available():
        print("build: the CUDA library is left out: PyTorch sees no GPU; build --cuda compiles it all the same")
        return status
    try:
        compilers.find_nvcc()
    except _build.BuildError as error:
        print(f"build: the CUDA library is left out: {error}")
        return status
    return max(status, _build_and_report(_build.build_cuda_cached))


def _build_and_report(build: Callable[..., tuple[Path, bool]]) -> int:
    start = time.perf_counter()
    try:
        path, compiled = build(show=_show)
    except (_build.BuildError, OSError) as error:  # OSError: a full disk, for example
        _show("")
        print(f"build: {error}")
        return 1
    _show("")
    took = f"compiled in {time.perf_counter() - start:.0f} s" if compiled else "already there"
    print(f"build: {path} ({took})")
    return 0


def _show(line: str) -> None:
    """Replace the last line of a terminal; write nothing to a log."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="", flush=True)
