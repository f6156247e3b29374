"""Compiles the C++ extension, and finds the one that fits these sources.

The only place that knows sources and flags: ``setup.py`` runs this file, and so does
``python -m crate_kernels build``. Nothing here runs on import of the package but ``find``, which reads
a file or two and never compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

_PACKAGE = Path(__file__).parent
# The first PyTorch whose stable ABI carries the extension: 2.11.
_TORCH_TARGET = "0x020b000000000000"
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
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


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


def cache_folder(sources: str) -> Path:
    """Return where a user's own build of these sources is, for this Python and this PyTorch."""
    from torch import __version__ as torch_version

    key = hashlib.sha256(f"{sources} {torch_version} {_SUFFIX}".encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "crate_kernels" / key


def find() -> Path | None:
    """Return the compiled extension that fits the sources, or None.

    An extension beside the package counts only if it is of the sources that are there: an old one would
    answer calls that it does not know.
    """
    folder = source_folder()
    sources = None if folder is None else source_hash(folder)
    installed = _PACKAGE / f"_C{_SUFFIX}"
    if installed.exists() and (sources is None or _marker(sources) in installed.read_bytes()):
        return installed
    if sources is not None:
        with contextlib.suppress(RuntimeError):  # no home folder
            cached = cache_folder(sources) / f"_C{_SUFFIX}"
            return cached if cached.exists() else None
    return None


def _marker(sources: str) -> bytes:
    return f"crate_kernels sources {sources}\0".encode()


def build_cached() -> tuple[Path, bool]:
    """Compile into the user's cache; return the extension's path and whether this call compiled it.

    Several processes may ask at once: one compiles, the others wait and find its result.

    Raises:
        BuildError: there are no sources or no working compiler.
    """
    folder = source_folder()
    if folder is None:
        raise BuildError("the C++ sources are not installed; install from a source distribution or a checkout")
    target = cache_folder(source_hash(folder)) / f"_C{_SUFFIX}"
    with _locked(target.parent):
        if target.exists():
            return target, False
        compile_extension(folder, target)
    return target, True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it when a process dies."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
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
    words = shlex.split(get_cxx_compiler())
    compiler = list(takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(compiler) :]  # of a CXX with options: they come last, so that they win
    includes = [*include_paths(), sysconfig.get_path("include")]
    flags = [
        *_FLAGS,
        f"-DCRATE_SOURCES={source_hash(folder)}",
        f"-ffile-prefix-map={folder}=csrc",  # check messages print source paths
        *(f"-isystem{path}" for path in includes),
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

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources, objects))
        linked = Path(scratch) / target.name
        link = ["-shared", *options, *undefined, *map(str, objects), *libraries, "-ltorch_cpu"]
        _run([*compiler, *link, "-o", str(linked)])
        os.replace(linked, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {error}; install one, or set CXX to it") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
