"""Compiles the C++ extension.

``python -m crate_kernels build`` and ``setup.py`` run this module. ``setup.py`` imports this folder without PyTorch and
without the rest of the package: its modules import each other relatively, and PyTorch only inside functions.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from . import libraries, ninja_build
from .compilers import find_cxx, pytorch
from .libraries import EXTENSION, FLAGS, BuildError
from .ninja_build import Recipe, Show

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
    folder = libraries.source_folder()
    if folder is None:
        raise BuildError("the C++ sources are not installed; install from a source distribution or a checkout")
    sources = libraries.source_hash(folder)
    target = libraries.cache_folder(sources) / EXTENSION
    # The target's path does not name the compiler: an import, which looks for the target, must not run one.
    record = target.with_suffix(".compiler")
    with ninja_build.locked(target.parent):  # of several processes one compiles, the others wait for its result
        if libraries.fits(target, sources) and _is_of_this_compiler(record):
            return target, False
        compile_extension(folder, target, libraries.user_cache(), show)
        libraries.put_checksum(target)
        record.write_text(repr(find_cxx()), encoding="utf-8")
    return target, True


def _is_of_this_compiler(record: Path) -> bool:
    """Return whether a record names this compiler; True where there is none to compile again."""
    try:
        found = repr(find_cxx())
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
    with ninja_build.open_objects(root, folder, torch_version, *compiler, version) as objects:
        paths = [path.relative_to(objects.sources) for path in objects.sources.rglob("*.cpp")]
        # The slowest first, so that no core idles at the end.
        sources = [path.as_posix() for path in sorted(paths, key=lambda path: (path.parent.name != "isa", path))]
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
