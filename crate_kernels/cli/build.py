"""``build``: compile the C++ extension into the user's cache."""

from __future__ import annotations

import argparse
import time

from crate_kernels import _build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: there are none."""


def run(args: argparse.Namespace) -> int:
    """Compile unless it is done; return 1 if it failed."""
    start = time.perf_counter()
    try:
        path, compiled = _build.build_cached()
    except _build.BuildError as error:
        print(f"build: {error}")
        return 1
    took = f"compiled in {time.perf_counter() - start:.0f} s" if compiled else "already there"
    print(f"build: {path} ({took})")
    return 0
