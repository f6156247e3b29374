"""Compiles the C++ extension and the CUDA library, and finds those that fit these sources.

The only place that knows sources and flags: ``setup.py`` runs this file, and so does
``python -m crate_kernels build``. Nothing here runs on import of the package but ``find`` and ``find_cuda``, which
read a file or two and never compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).parents[1]
# The first PyTorch whose stable ABI carries the extension: 2.11.
_TORCH_TARGET = "0x020b000000000000"
# The stable ABI, and operators in place of a Python module, make one file serve every Python.
EXTENSION, CUDA_LIBRARY = "_cpu.so", "_cuda.so"
_PLATFORM = sysconfig.get_platform()
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    # Kernels read errno nowhere and trap nowhere; without these, compilers keep rounding and minima scalar.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}",
)
_CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DUSE_CUDA",
    f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}",
    "-Xptxas=-v",  # registers, shared memory and spills of every kernel, kept beside the library
    # Of PyTorch's headers: `long long` constants, and members that only a newer standard would have.
    "-Xcudafe=--diag_suppress=177,--diag_suppress=20012",
)
# What the CUDA sources include of the CPU extension's: a change of either library's own files rebuilds that one only.
_CUDA_HEADERS = ("common/box.h", "common/dtype.h", "common/tensor.h", "mssa/call.h", "tssa/call.h")
# Turing, Ampere (Ada runs its code), Hopper; PTX of the last for what comes after.
CUDA_ARCHS = ("75", "80", "90a", "90+PTX")
_LEAST_NVCC = (12, 0)  # the first that knows sm_90a


class BuildError(RuntimeError):
    """The extension could not be compiled; the message says what to do about it."""


def source_folder() -> Path | None:
    """Return where the C++ sources are: in an installed package, beside it in a checkout, or nowhere."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").exists():
            return folder
    return None


def source_hash(folder: Path) -> str:
    """Identify the sources and flags by their content."""
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cpp", ".h")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cuda_source_hash(folder: Path) -> str:
    """Identify the sources and flags of the CUDA library by their content."""
    digest = hashlib.sha256(repr(_CUDA_FLAGS).encode())
    shared = [folder / name for name in _CUDA_HEADERS]
    for path in sorted([*shared, *(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh"))]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder(sources: str) -> Path:
    """Return where a user's own build of these sources is, for this PyTorch and this kind of machine."""
    from torch import __version__ as torch_version

    key = hashlib.sha256(f"{sources} {torch_version} {_PLATFORM}".encode()).hexdigest()[:16]
    return _user_cache() / key


def find() -> Path | None:
    """Return the compiled extension that fits the sources, or None.

    An extension beside the package counts only if it is of the sources that are there: an old one would
    answer calls that it does not know.
    """
    folder = source_folder()
    sources = None if folder is None else source_hash(folder)
    places = [_PACKAGE / EXTENSION]
    if sources is not None:
        with contextlib.suppress(BuildError):  # no home folder
            places.append(cache_folder(sources) / EXTENSION)
    return next((place for place in places if _fits(place, sources)), None)


def cuda_cache_folder(sources: str) -> Path:
    """Return where a user's own builds of the CUDA library of these sources are: one a set of architectures.

    The stable ABI makes them fit every Python and every PyTorch that can load the extension at all.
    """
    return _user_cache() / f"cuda-{sources}-{_PLATFORM}"


def find_cuda() -> tuple[Path, ...]:
    """Return the CUDA libraries that fit the sources: the installed one first."""
    folder = source_folder()
    sources = None if folder is None else cuda_source_hash(folder)
    places = [_PACKAGE / CUDA_LIBRARY]
    if sources is not None:
        with contextlib.suppress(BuildError, OSError):  # no home folder, or one that cannot be looked into
            places += sorted(cuda_cache_folder(sources).glob("_cuda-*.so"))
    return tuple(place for place in places if _fits(place, sources))


def _user_cache() -> Path:
    try:
        return Path.home() / ".cache" / "crate_kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no cache without a home folder: {error} Set HOME") from error


def _fits(library: Path, sources: str | None) -> bool:
    """Whether a library is there, whole, and of these sources; of any, where there are none to compare."""
    try:
        content = library.read_bytes()
    except OSError:  # absent, or in a folder that cannot be looked into
        return False
    return _whole(content) and _marker("" if sources is None else sources) in content


def _whole(content: bytes) -> bool:
    """Whether nothing is cut off an ELF file: the process that maps such a file ends by SIGBUS.

    Linkers write the table of sections last.
    """
    if content[:5] != b"\x7fELF\x02":  # another system's file, or no library at all, which the marker tells
        return True
    if len(content) < 64:
        return False
    order: Literal["little", "big"] = "little" if content[5] == 1 else "big"
    offset, size, count = (int.from_bytes(content[start:stop], order) for start, stop in ((40, 48), (58, 60), (60, 62)))
    return offset + size * count <= len(content)


def _marker(sources: str) -> bytes:
    return f"crate_kernels sources {sources}".encode() + (b"\0" if sources else b"")


def build_cached() -> tuple[Path, bool]:
    """Compile into the user's cache; return the extension's path and whether this call compiled it.

    Several processes may ask at once: one compiles, the others wait and find its result.

    Raises:
        BuildError: there are no sources, no folder to write to, or no working compiler.
    """
    folder = source_folder()
    if folder is None:
        raise BuildError("the C++ sources are not installed; install from a source distribution or a checkout")
    sources = source_hash(folder)
    target = cache_folder(sources) / EXTENSION
    with _locked(target.parent):
        if _fits(target, sources):
            return target, False
        compile_extension(folder, target)
    return target, True


def build_cuda_cached(archs: tuple[str, ...] | None = None) -> tuple[Path, bool]:
    """Compile the CUDA library into the user's cache; return its path and whether this call compiled it.

    Args:
        archs: such as ``CUDA_ARCHS``; by default those of the GPUs here, or ``CUDA_ARCHS`` where there is none.

    Raises:
        BuildError: there are no sources, no folder to write to, no nvcc that fits, or it fails.
    """
    folder = source_folder()
    if folder is None:
        raise BuildError("the CUDA sources are not installed; install from a source distribution or a checkout")
    archs = cuda_archs() if archs is None else archs
    sources = cuda_source_hash(folder)
    target = cuda_cache_folder(sources) / f"_cuda-{'-'.join(archs)}.so"
    with _locked(target.parent):
        if _fits(target, sources):
            return target, False
        compile_cuda(folder, target, archs, target.with_suffix(".so.txt"))
    return target, True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, made if it is not there; the system releases it when a process dies.

    Raises:
        BuildError: nothing can be written there.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115  # closed below
    except OSError as error:
        raise BuildError(f"the user's cache cannot be written: {error}; set HOME to a folder that can") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_extension(folder: Path, target: Path) -> None:
    """Compile the sources in ``folder`` and put the extension at ``target``, whole or not at all.

    Raises:
        BuildError: PyTorch or a compiler is missing, or the compiler fails.
    """
    try:
        from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths
    except (ImportError, OSError) as error:  # OSError: PyTorch is there, a library it loads is not
        raise BuildError(f"PyTorch is not importable ({error})") from error
    compiler, options = _split(get_cxx_compiler())
    flags = [
        *_FLAGS,
        f"-DCRATE_SOURCES={source_hash(folder)}",
        f"-ffile-prefix-map={folder}=csrc",  # check messages print source paths
        *(f"-isystem{path}" for path in include_paths()),
        *options,
    ]
    libraries = [f"-L{path}" for path in library_paths()]
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(folder.rglob("*.cpp"), key=lambda p: (p.parent.name != "isa", p))  # the slowest first
        objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]

        def compile_one(source: Path, output: Path) -> None:
            _run([*compiler, *flags, "-c", str(source), "-o", str(output)])

        with ThreadPoolExecutor(_cores()) as pool:
            list(pool.map(compile_one, sources, objects))
        linked = Path(scratch) / target.name
        link = ["-shared", *options, *undefined, *map(str, objects), *libraries, "-ltorch_cpu"]
        _run([*compiler, *link, "-o", str(linked)])
        _move(linked, target)


def _split(cxx: str) -> tuple[list[str], list[str]]:
    """Split what CXX says into the compiler and its options, which come last in a command, so that they win."""
    try:
        words = shlex.split(cxx)
    except ValueError as error:
        raise BuildError(f"CXX cannot be read ({error}): {cxx}") from error
    compiler = list(takewhile(lambda word: not word.startswith("-"), words))
    if not compiler:
        raise BuildError(f"CXX must name a C++ compiler, got {cxx!r}")
    return compiler, words[len(compiler) :]


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _move(linked: Path, target: Path) -> None:
    """Put a library at ``target`` once it is on the disk: a power cut must not leave a part of it."""
    with open(linked, "rb") as file:
        os.fsync(file.fileno())
    os.replace(linked, target)


def find_nvcc() -> str:
    """Return an nvcc that this PyTorch can be extended with.

    Raises:
        BuildError: there is none, or it is too old, or of a newer CUDA than PyTorch's, whose drivers may not serve it.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    beside = shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None
    nvcc = beside or shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("no nvcc: install the CUDA toolkit, with nvcc on PATH or in CUDA_HOME")
    said = _run([nvcc, "--version"])
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
    """Return the architectures of the GPUs here, with PTX for newer ones; ``CUDA_ARCHS`` where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return CUDA_ARCHS
    capabilities = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
    own = [f"{major}{minor}" for major, minor in sorted(capabilities)]
    known = _run([find_nvcc(), "--list-gpu-code"]).split()
    if any(f"sm_{arch}" not in known for arch in own):
        return CUDA_ARCHS
    return (*("90a" if arch == "90" else arch for arch in own), f"{own[-1]}+PTX")


def compile_cuda(folder: Path, target: Path, archs: tuple[str, ...], report: Path | None = None) -> None:
    """Compile the CUDA sources in ``folder`` for ``archs`` and put the library at ``target``, whole or not at all.

    What the assembler says of every kernel's resources is put at ``report``, if that is given.

    Raises:
        BuildError: PyTorch or nvcc is missing or too old, or it fails.
    """
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except (ImportError, OSError) as error:
        raise BuildError(f"PyTorch is not importable ({error})") from error
    nvcc = find_nvcc()
    codes = []
    for arch in archs:
        number, ptx = arch.partition("+")[::2]
        codes += ["-gencode", f"arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}"]
    flags = [
        *_CUDA_FLAGS,
        *codes,
        f"-DCRATE_SOURCES={cuda_source_hash(folder)}",
        f"-DCRATE_ARCHS={'_'.join(archs).replace('+', '')}",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xcompiler=" + f"-ffile-prefix-map={folder}=csrc".replace(",", "\\,"),
        *(f"-Xcompiler=-ffile-prefix-map={path}=include" for path in include_paths()),
        *(word for path in include_paths() for word in ("-isystem", path)),
    ]
    folders = library_paths()
    # A CPU PyTorch has no libtorch_cuda; the library then compiles and links, and cannot be loaded.
    names = [n for n in ("torch_cpu", "torch_cuda") if any((Path(f) / f"lib{n}.so").exists() for f in folders)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # The slowest first: an operator's kernels are in the headers beside its launchers.
        sources = sorted(folder.rglob("*.cu"), key=lambda p: -sum(h.stat().st_size for h in p.parent.glob("*.cuh")))
        objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]

        def compile_one(source: Path, output: Path) -> str:
            return _run([nvcc, *flags, "-c", str(source), "-o", str(output)])

        with ThreadPoolExecutor(_cores()) as pool:
            reports = list(pool.map(compile_one, sources, objects))
        linked = Path(scratch) / target.name
        link = ["-shared", "-cudart=static", "-nodlink", *map(str, objects), *(f"-L{f}" for f in folders)]
        _run([nvcc, *link, *(f"-l{n}" for n in names), "-o", str(linked)])
        if report is not None:
            report.write_text("".join(reports))
        _move(linked, target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {error}; install one, or set CXX to it") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
