"""A stand-in for cuBLASLt, on CPU tensors of 16 bits: compiled once, and taken by csrc/common/lt.cpp meanwhile."""

import ctypes
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch

from crate_kernels._core import plan
from crate_kernels._native.compilers import find_cxx, pytorch

_NUMBERS = (
    *("created", "searched", "multiplied", "gated"),
    *("create_status", "search_status", "multiply_status", "scaled", "bits_from_the_top"),
)


class Asked(ctypes.Structure):
    """What a search for an algorithm was asked for."""

    _fields_ = (("workspace", ctypes.c_uint64), ("reductions", ctypes.c_uint32), ("alignment", ctypes.c_uint32 * 4))


def compiled(folder):
    """Compile the stand-in; return its path."""
    path = folder / "libcublasLt-standin.so"
    compiler, options, _ = find_cxx()
    headers = [f"-isystem{each}" for each in pytorch()[1].include_paths()]
    source = Path(__file__).with_name("standin.cpp")
    command = [*compiler, "-std=c++20", "-shared", "-fPIC", "-O2", *headers, *options, str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


@contextmanager
def driving(path):
    """Let products be the stand-in's; yields the library, whose numbers by name are read and written."""
    library = ctypes.CDLL(str(path))
    for name in _NUMBERS:
        ctypes.c_int.in_dll(library, name).value = 0
    torch.ops.crate_kernels_C.lt_drive_by(str(path))
    plan.forget()
    try:
        yield library
    finally:
        torch.ops.crate_kernels_C.lt_drive_by("")
        plan.forget()


def number(library, name):
    """Return the number of this name, which may be written."""
    return ctypes.c_int.in_dll(library, name)
