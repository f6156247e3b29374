"""Finds the compilers, what they say of themselves, and the GPUs that they compile for.

PyTorch is imported only inside functions, as build.py says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from itertools import takewhile
from typing import Any

from .libraries import BuildError

# Turing, Ampere (Ada runs Ampere code), Hopper; Hopper's PTX for newer GPUs.
CUDA_ARCHS = ("75", "80", "90a", "90+PTX")
_LEAST_NVCC = (12, 0)  # the first version with sm_90a


def find_nvcc() -> str:
    """Return an nvcc that suits this PyTorch.

    Raises:
        BuildError: nvcc is missing, too old, or of a newer CUDA than PyTorch's, which may need a newer driver.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    beside = shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None
    nvcc = beside or shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("no nvcc: install the CUDA toolkit, with nvcc on PATH or in CUDA_HOME")
    said = run([nvcc, "--version"])
    match = re.search(r"release (\d+)\.(\d+)", said)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release: {said.strip()}")
    release = int(match[1]), int(match[2])
    if release < _LEAST_NVCC:
        raise BuildError(f"{nvcc} is {match[1]}.{match[2]}; {_LEAST_NVCC[0]}.{_LEAST_NVCC[1]} or later is needed")
    if torch.version.cuda and release[0] > int(torch.version.cuda.partition(".")[0]):
        raise BuildError(
            f"{nvcc} is {match[1]}.{match[2]}, PyTorch has CUDA {torch.version.cuda}: their drivers differ"
        )
    return nvcc


def cuda_archs() -> tuple[str, ...]:
    """Return the architectures of this machine's GPUs, with PTX for newer ones; ``CUDA_ARCHS`` without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return CUDA_ARCHS
    capabilities = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
    own = [f"{major}{minor}" for major, minor in sorted(capabilities)]
    known = run([find_nvcc(), "--list-gpu-code"]).split()
    if any(f"sm_{arch}" not in known for arch in own):
        return CUDA_ARCHS
    return (*("90a" if arch == "90" else arch for arch in own), f"{own[-1]}+PTX")


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


def nvcc_and_version() -> tuple[str, str]:
    """Return nvcc, and what it says of its version."""
    nvcc = find_nvcc()
    return nvcc, run([nvcc, "--version"])


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
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
