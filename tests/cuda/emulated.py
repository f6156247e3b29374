"""Compiles the CUDA sources for the CPU, against emulator.h, once for all tests that ask."""

import hashlib
import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

from crate_kernels import _build

HERE = Path(__file__).parent
EMULATOR = (HERE / "emulator.h", HERE / "emulator.cpp", *sorted(HERE.glob("*.cu")))
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
    "-Wno-unknown-pragmas",  # of nvcc's
    "-Wno-psabi",
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION={_build._TORCH_TARGET}",
    "-DCRATE_ARCHS=emulated",
)


def build(folder):
    """Return the emulated library of the sources in ``folder``, compiled if it is not there yet."""
    sources = _build.cuda_source_hash(folder)
    key = hashlib.sha256(repr((FLAGS, sources)).encode() + b"".join(path.read_bytes() for path in EMULATOR))
    target = Path.home() / ".cache" / "crate_kernels" / f"emulated-{key.hexdigest()[:16]}" / "_emulated.so"
    with _build._locked(target.parent):
        if not target.exists():
            _compile(folder, sources, target)
    return target


def _compile(folder, sources, target):
    compiler = shlex.split(get_cxx_compiler())
    flags = [*FLAGS, f"-DCRATE_SOURCES={sources}", "-include", str(EMULATOR[0])]
    flags += [word for path in include_paths() for word in ("-isystem", path)]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        files = [*EMULATOR[1:], *sorted(folder.rglob("*.cu"))]
        objects = [Path(scratch) / f"{number}.o" for number in range(len(files))]

        def compile_one(source, output):
            run([*compiler, *flags, "-x", "c++", "-c", str(source), "-o", str(output)])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, files, objects))
        linked = Path(scratch) / target.name
        folders = [f"-L{path}" for path in library_paths()]
        run([*compiler, "-shared", *map(str, objects), *folders, "-ltorch_cpu", "-o", str(linked)])
        os.replace(linked, target)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
