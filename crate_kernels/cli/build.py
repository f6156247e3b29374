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
from crate_kernels._native.ninja_build import COMPILING

_EVERY = 20.0  # seconds between two lines in a log


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
    start, show = time.perf_counter(), _Progress()
    try:
        path, compiled = build(show=show)
    except (_build.BuildError, OSError) as error:  # OSError: a full disk, for example
        show("")
        print(f"build: {error}")
        return 1
    show("")
    took = f"compiled in {time.perf_counter() - start:.0f} s" if compiled else "already there"
    print(f"build: {path} ({took})")
    return 0


class _Progress:
    """Shows progress: a line that replaces itself on a terminal, one line in a while in a log."""

    def __init__(self) -> None:
        self._due = 0.0  # of time.monotonic

    def __call__(self, line: str) -> None:
        if line == COMPILING:
            print(f"build: {COMPILING}: a minute or two, up to 8 where others use the cores", flush=True)
            self._due = time.monotonic() + _EVERY
        elif sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif line and time.monotonic() >= self._due:
            print(f"build: {line}", flush=True)
            self._due = time.monotonic() + _EVERY
