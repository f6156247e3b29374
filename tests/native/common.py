"""A stand-in for the compiler, and helpers of the tests that build."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crate_kernels._native import build as _build
from crate_kernels._native import libraries as _libraries

SOURCES = _libraries.source_folder()
needs_sources = pytest.mark.skipif(SOURCES is None, reason="needs the C++ sources: run from a checkout")
# Stand-in for a compiler: writes the sources' marker to the requested output; the linker joins the objects.
WRITE = r"""case "$*" in *--version*) exit;; esac
PATH=/usr/bin:/bin
for last; do
  case "$last" in
  -DCRATE_SOURCES=*) sources="${last#*=}";;
  *.o) objects="$objects $last";;
  esac
done
case "$*" in *-shared*) cat $objects > "$last";; *) printf 'crate_kernels sources %s\0' "$sources" > "$last";; esac
"""
SLOW_COMPILER = """#!/bin/sh
# Stand-in that records each link.
case "$*" in *-shared*) echo link >> "{log}"; sleep 0.3;; esac
{write}"""


def files_left(folder):
    """List the files of a cache, without the folders in which the next build continues."""
    cache = folder / ".cache" / "crate_kernels"
    files = [path.relative_to(cache) for path in cache.rglob("*") if path.is_file()]
    return [path.name for path in files if not path.parts[0].startswith("objects-")]


def assert_one_of_two_builds(environment):
    """Build in two processes at once: one compiles, the other waits and uses its result."""
    root = str(Path(_build.__file__).parents[2])
    command = [sys.executable, "-m", "crate_kernels", "build"]

    def build(_):
        own = {**environment, "PYTHONPATH": root}
        return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(build, range(2)))
    assert [r.returncode for r in results] == [0, 0], results
    assert sum("compiled in" in r.stdout for r in results) == 1
    assert sum("already there" in r.stdout for r in results) == 1
