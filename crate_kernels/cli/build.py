"""``build``: compile the C++ extension into the user's cache."""

from __future__ import annotations

import argparse
import sys
import time

from crate_kernels._native import build as _build
from crate_kernels._native.ninja_build import COMPILING

_EVERY = 20.0  # seconds between two lines in a log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: none."""


def run(args: argparse.Namespace) -> int:
    """Compile the extension unless it is there; return 1 on failure."""
    start, show = time.perf_counter(), _Progress()
    try:
        path, compiled = _build.build_cached(show)
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
