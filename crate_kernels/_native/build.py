"""Compiles the C++ extension and the CUDA library.

``python -m crate_kernels build`` and ``setup.py`` run this module. ``setup.py`` imports this folder without PyTorch and
without the rest of the package: its modules import each other relatively, and PyTorch only inside functions.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from . import libraries, ninja_build
from .libraries import CUDA_FLAGS, CUDA_LIBRARIES, EXTENSION, FLAGS, BuildError
from .ninja_build import Recipe, Show

# Turing, Ampere (Ada runs Ampere code), Hopper; Hopper's PTX for newer GPUs.
CUDA_ARCHS = ("75", "80", "90a", "90+PTX")
_LEAST_NVCC = (12, 0)  # the first version with sm_90a
_TORCH_CUDA = "libtorch_cuda.so"

# clang's options for files of one level, isa/<operator>_<level>.cpp. GCC reads the same in csrc/common/cpu/level_*.h.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")), "-mprefer-vector-width=512")
_LEVELS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


def show_nothing(line: str) -> None:
    """Ignore a line of progress."""


def build_cached(show: Show = show_nothing) -> tuple[Path, bool]:
    """Compile into the user's cache; return the extension's path and whether this call compiled it.

    ``show`` is called with each line of progress.

    Raises:
        BuildError: there are no sources, no folder to write to, or no working compiler.
    """
    folder = _sources("C++")
    sources = libraries.source_hash(folder)
    target = libraries.cache_folder(sources) / EXTENSION
    return _once(target, sources, _cxx, lambda: compile_extension(folder, target, libraries.user_cache(), show))


def build_cuda_cached(archs: tuple[str, ...] | None = None, show: Show = show_nothing) -> tuple[Path, bool]:
    """Compile the CUDA library into the user's cache; return its path and whether this call compiled it.

    ``archs`` are as in ``CUDA_ARCHS``; by default those of this machine's GPUs, or all without a GPU.

    Raises:
        BuildError: there are no sources, no folder to write to, no suitable nvcc, or nvcc fails.
    """
    folder = _sources("CUDA")
    archs = cuda_archs() if archs is None else archs
    sources = libraries.cuda_source_hash(folder)
    target = libraries.cuda_cache_folder(sources) / f"_cuda-{'-'.join(archs)}.so"
    report = target.with_suffix(".so.txt")
    return _once(
        target, sources, _nvcc, lambda: compile_cuda(folder, target, archs, libraries.user_cache(), report, show)
    )


def _sources(language: str) -> Path:
    folder = libraries.source_folder()
    if folder is None:
        raise BuildError(f"the {language} sources are not installed; install from a source distribution or a checkout")
    return folder


def _once(
    target: Path, sources: str, compiler: Callable[[], object], compile_it: Callable[[], object]
) -> tuple[Path, bool]:
    """Compile a library unless this compiler did: of several processes one compiles, the others wait for its result.

    ``compiler`` returns what identifies it. A file beside the target records that: the target's path does not name it,
    as an import, which looks for the target, must not run a compiler.
    """
    record = target.with_suffix(".compiler")
    with ninja_build.locked(target.parent):
        if libraries.fits(target, sources) and _is_of(record, compiler):
            return target, False
        compile_it()
        record.write_text(repr(compiler()), encoding="utf-8")
    return target, True


def _is_of(record: Path, compiler: Callable[[], object]) -> bool:
    """Return whether a record names this compiler; True where there is none to compile again."""
    try:
        found = repr(compiler())
    except BuildError:
        return True
    return record.exists() and record.read_text(encoding="utf-8") == found


def compile_extension(folder: Path, target: Path, root: Path, show: Show = show_nothing) -> None:
    """Compile the sources in ``folder`` and put the extension at ``target``, atomically.

    ``root`` has the folders of object files, which are kept for the next build.

    Raises:
        BuildError: PyTorch, ninja or a compiler is missing, or the compiler fails.
    """
    torch_version, cpp_extension = _torch()
    compiler, options, version = _cxx()
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    with ninja_build.open_objects(root, "cpu", folder, torch_version, *compiler, version) as objects:
        sources = _relative(objects.sources, "*.cpp", lambda path: (path.parent.name != "isa", path))
        recipe = Recipe(
            sources=sources,
            compile=[*compiler, *FLAGS, *(f"-isystem{path}" for path in cpp_extension.include_paths()), *options],
            link=[*compiler, "-shared", *options, *undefined],
            libraries=[*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu"],
            extra={
                "library.cpp": [f"-DCRATE_SOURCES={libraries.source_hash(objects.sources)}"],
                **_level_options(sources, version),
            },
        )
        ninja_build.build(objects, recipe, target, show)


def _level_options(sources: Sequence[str], version: str) -> dict[str, Sequence[str]]:
    """Return the options of the files of one level, for the compiler that calls itself ``version``."""
    if "clang" not in version or platform.machine() != "x86_64":
        return {}
    levels = {source: Path(source).stem.partition("_")[2] for source in sources if Path(source).parent.name == "isa"}
    return {source: _LEVELS[level] for source, level in levels.items() if level in _LEVELS}


def compile_cuda(
    folder: Path,
    target: Path,
    archs: tuple[str, ...],
    root: Path,
    report: Path | None = None,
    show: Show = show_nothing,
) -> None:
    """Compile the CUDA sources in ``folder`` for ``archs``, as ``compile_extension`` compiles the C++ sources.

    ``report`` is the file for the assembler's report: registers, shared memory and spills of every kernel.

    Raises:
        BuildError: PyTorch, ninja or nvcc is missing, nvcc is too old, or nvcc fails.
    """
    torch_version, cpp_extension = _torch()
    nvcc, version = _nvcc()
    codes = []
    for arch in archs:
        number, ptx = arch.partition("+")[::2]
        codes += ["-gencode", f"arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}"]
    folders, headers = cpp_extension.library_paths(), cpp_extension.include_paths()
    with ninja_build.open_objects(root, "cuda", folder, torch_version, nvcc, version, *archs) as objects:
        if not any((Path(found) / _TORCH_CUDA).exists() for found in folders):  # a CPU PyTorch
            _put_stand_in(nvcc, objects.folder)
            folders.append(str(objects.folder))
        recipe = Recipe(
            # An operator's kernels are in the headers next to its launchers.
            sources=_relative(
                objects.sources, "*.cu", lambda p: -sum(h.stat().st_size for h in p.parent.glob("*.cuh"))
            ),
            compile=[
                nvcc,
                *CUDA_FLAGS,
                *codes,
                "-Xcompiler=-fPIC,-fvisibility=hidden",
                *(f"-Xcompiler=-ffile-prefix-map={path}=include" for path in headers),
                *(word for path in headers for word in ("-isystem", path)),
            ],
            link=[nvcc, "-shared", "-cudart=static", "-nodlink"],
            libraries=[*(f"-L{path}" for path in folders), *CUDA_LIBRARIES],
            extra={
                "library.cu": [
                    f"-DCRATE_SOURCES={libraries.cuda_source_hash(objects.sources)}",
                    f"-DCRATE_ARCHS={'_'.join(archs).replace('+', '')}",
                ]
            },
            reports=True,
        )
        ninja_build.build(objects, recipe, target, show, report)


def _put_stand_in(nvcc: str, folder: Path) -> None:
    """Put an empty libtorch_cuda into a folder: what is linked to it asks for PyTorch's own where it is loaded."""
    source = folder / "stand_in.cu"
    source.touch()
    named = ["-Xlinker=-soname", f"-Xlinker={_TORCH_CUDA}", "-o", str(folder / _TORCH_CUDA)]
    _run([nvcc, "-shared", "-cudart=none", str(source), *named])


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
    """Return the architectures of this machine's GPUs, with PTX for newer ones; ``CUDA_ARCHS`` without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return CUDA_ARCHS
    capabilities = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
    own = [f"{major}{minor}" for major, minor in sorted(capabilities)]
    known = _run([find_nvcc(), "--list-gpu-code"]).split()
    if any(f"sm_{arch}" not in known for arch in own):
        return CUDA_ARCHS
    return (*("90a" if arch == "90" else arch for arch in own), f"{own[-1]}+PTX")


def _torch() -> tuple[str, Any]:
    """Return PyTorch's version and its module for extensions."""
    try:
        from torch import __version__
        from torch.utils import cpp_extension
    except (ImportError, OSError) as error:  # OSError: PyTorch is installed, but a library it loads is missing
        raise BuildError(f"PyTorch is not importable ({error})") from error
    return __version__, cpp_extension


def _cxx() -> tuple[list[str], list[str], str]:
    """Return the C++ compiler, the options that come with it, and what it says of its version."""
    compiler, options = _split(_torch()[1].get_cxx_compiler())
    return compiler, options, _run([*compiler, "--version"])


def _nvcc() -> tuple[str, str]:
    """Return nvcc, and what it says of its version."""
    nvcc = find_nvcc()
    return nvcc, _run([nvcc, "--version"])


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


def _relative(folder: Path, pattern: str, order: Callable[[Path], Any]) -> list[str]:
    """List the sources, the slowest first, so that no core idles at the end."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob(pattern), key=order)]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {error}; install one, or set CXX to it") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
