"""Finds the C++ compiler, and what it says of itself.

PyTorch is imported only inside functions, as build.py says.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import takewhile
from typing import Any

from .libraries import BuildError


def pytorch() -> tuple[str, Any]:
    """Return PyTorch's version and its module for extensions."""
    try:
        from torch import __version__
        from torch.utils import cpp_extension
    except (ImportError, OSError) as error:  # OSError: PyTorch is installed, but a library it loads is missing
        raise BuildError(f"PyTorch is not importable ({error})") from error
    return __version__, cpp_extension


def find_cxx() -> tuple[list[str], list[str], str]:
    """Return the C++ compiler, the options that come with it, and what it says of its version."""
    compiler, options = _split(pytorch()[1].get_cxx_compiler())
    return compiler, options, run([*compiler, "--version"])


def _split(cxx: str) -> tuple[list[str], list[str]]:
    """Split CXX into the compiler and its options. Put the options last in a command, so that they win."""
    try:
        words = shlex.split(cxx)
    except ValueError as error:
        raise BuildError(f"CXX cannot be read ({error}): {cxx}") from error
    compiler = list(takewhile(lambda word: not word.startswith("-"), words))
    if not compiler:
        raise BuildError(f"CXX must name a C++ compiler, got {cxx!r}")
    # ninja runs the compiler in another folder.
    return [os.path.abspath(word) if "/" in word else word for word in compiler], words[len(compiler) :]


def run(command: list[str]) -> str:
    """Run a command of a compiler; return what it says.

    Raises:
        BuildError: the compiler is missing, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {error}; install one, or set CXX to it") from error
    if done.returncode != 0:
        failed = f"the C++ compiler failed with status {done.returncode}: {shlex.join(command)}"
        raise BuildError(f"{failed}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
