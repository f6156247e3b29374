"""Compiles the C++ extension and the CUDA library.

``python -m crate_kernels build`` and ``setup.py`` run this module. ``setup.py`` imports this folder without PyTorch and
without the rest of the package: its modules import each other relatively, and PyTorch only inside functions.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import libraries, ninja_build
from .compilers import cuda_archs, find_cxx, nvcc_and_version, pytorch, run
from .libraries import CUDA_FLAGS, CUDA_LIBRARIES, EXTENSION, FLAGS, BuildError
from .ninja_build import Recipe, Show

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
    return _once(target, sources, find_cxx, lambda: compile_extension(folder, target, libraries.user_cache(), show))


def build_cuda_cached(archs: tuple[str, ...] | None = None, show: Show = show_nothing) -> tuple[Path, bool]:
    """Compile the CUDA library into the user's cache; return its path and whether this call compiled it.

    ``archs`` are as in ``compilers.CUDA_ARCHS``; by default those of this machine's GPUs, or all without a GPU.

    Raises:
        BuildError: there are no sources, no folder to write to, no suitable nvcc, or nvcc fails.
    """
    folder = _sources("CUDA")
    archs = cuda_archs() if archs is None else archs
    sources = libraries.cuda_source_hash(folder)
    target = libraries.cuda_cache_folder(sources) / f"_cuda-{'-'.join(archs)}.so"
    report = target.with_suffix(".so.txt")
    return _once(
        target,
        sources,
        nvcc_and_version,
        lambda: compile_cuda(folder, target, archs, libraries.user_cache(), report, show),
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
        libraries.put_checksum(target)
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
    torch_version, cpp_extension = pytorch()
    compiler, options, version = find_cxx()
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
    torch_version, cpp_extension = pytorch()
    nvcc, version = nvcc_and_version()
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
    run([nvcc, "-shared", "-cudart=none", str(source), *named])


def _relative(folder: Path, pattern: str, order: Callable[[Path], Any]) -> list[str]:
    """List the sources, the slowest first, so that no core idles at the end."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob(pattern), key=order)]
