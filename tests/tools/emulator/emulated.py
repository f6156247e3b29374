"""Compile the emulator, and the kernels that test it, once for all tests."""

import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

from crate_kernels._cuda import sources
from crate_kernels._native import libraries, ninja_build
from crate_kernels._native.compilers import find_cxx
from tests.tools import compiling, natives
from tests.tools.emulator import gpu

HERE = Path(__file__).parent
EMULATOR = sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".cpp"))
FLAGS = (
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # of CUDA's compilers
    "-Wno-psabi",
    # Trap, as a GPU does, on an address that is not a multiple of the access's size; needs no library.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)
KERNEL_FLAGS = (*FLAGS, "-O1")  # most of them run for some milliseconds, once
LIBRARY_FLAGS = (f"-DTORCH_TARGET_VERSION={libraries.TORCH_TARGET}",)
_FROM_CSRC = re.compile(r'^#include "\.\./\.\./\.\./csrc/(.+)"$', re.MULTILINE)


def unavailable_reason():
    """Say why the kernels cannot be emulated here; None if they can."""
    if libraries.source_folder() is None:
        return "needs the CUDA sources: run from a checkout"
    if not sys.platform.startswith("linux"):
        return "needs Linux, for which the emulator is written"
    compiler = shlex.split(get_cxx_compiler())[0]
    if shutil.which(compiler) is None or "clang" in compiler:
        return f"needs g++, not {compiler}: install it or set CXX"
    if torch.cuda.is_available():
        return "takes the place of the driver of this machine's GPU: set CUDA_VISIBLE_DEVICES to nothing"
    return None


def load():
    """Compile and load the emulator, and let it run the kernels that are launched on CPU tensors."""
    path = build()
    torch.ops.load_library(path)
    gpu.use(path)


def register():
    """Register the CUDA kernels of backend "cpp" as backend "emulated" for CPU tensors."""
    natives.register("emulated")


def on_cuda(op):
    """Import the native module of an operator a second time; this copy treats every tensor as a CUDA tensor."""
    return natives.native(op)


def build():
    """Return the emulator's library, compiled if it is not there yet."""
    texts = [path.read_text() for path in EMULATOR]
    headers = [sorted(sources.headers(name).items()) for name in _FROM_CSRC.findall("\n".join(texts))]
    # What is compiled beforehand is of one compiler and one PyTorch.
    key = hashlib.sha256(repr((find_cxx(), torch.__version__, KERNEL_FLAGS, LIBRARY_FLAGS, texts, headers)).encode())
    target = Path.home() / ".cache" / "crate_kernels" / f"emulated-{key.hexdigest()[:16]}" / "_emulated.so"
    with ninja_build.locked(target.parent):
        if not target.exists():
            _compile(target)
    return target


def _compile(target):
    compiler = shlex.split(get_cxx_compiler())
    flags = [*FLAGS, *LIBRARY_FLAGS, "-include", str(HERE / "emulator.h"), *searched()]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        files = [path for path in EMULATOR if path.suffix != ".h"]
        objects = compiling.objects([*compiler, *flags], files, Path(scratch))
        for header in ("emulator.h", "entry.h"):
            shutil.copy(HERE / header, target.parent)
        entry, precompiled = target.parent / "entry.h", Path(scratch) / "entry.h.gch"
        compiling.run([*compiler, *KERNEL_FLAGS, *searched(), "-x", "c++-header", entry, "-o", precompiled])
        os.replace(precompiled, target.parent / precompiled.name)
        linked = Path(scratch) / target.name
        folders = [f"-L{path}" for path in library_paths()]
        compiling.run([*compiler, "-shared", *objects, *folders, "-ltorch_cpu", "-ldl", "-o", linked])
        os.replace(linked, target)


def searched():
    """Return the options by which g++ finds PyTorch's headers."""
    return [word for path in include_paths() for word in ("-isystem", path)]
