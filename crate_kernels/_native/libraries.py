"""Finds the compiled extension that fits the sources. Only this module knows sources and flags.

``extension`` imports this module together with the package, so it reads few files and never compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).parents[1]
# The first PyTorch whose stable ABI suffices for the extension: 2.11.
TORCH_TARGET = "0x020b000000000000"
# One file for every Python: it uses the stable ABI, and defines operators instead of a Python module.
EXTENSION = "_cpu.so"
PLATFORM = sysconfig.get_platform()
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    # Kernels neither read errno nor trap. Without these flags, compilers do not vectorise rounding and minima.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
)


class BuildError(RuntimeError):
    """A library could not be compiled; the message says what to do about it."""


def source_folder() -> Path | None:
    """Return the folder of the C++ sources: inside an installed package, next to it in a checkout, or None."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "library.cpp").exists():
            return folder
    return None


def source_hash(folder: Path) -> str:
    """Return a hash of the extension's sources and flags."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cpp", ".h")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def user_cache() -> Path:
    """Return the folder of what a user builds and tunes: in XDG_CACHE_HOME if that is absolute, else in ~/.cache.

    Raises:
        BuildError: there is no home folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # others are to be ignored, says the specification
        return Path(caches) / "crate_kernels"
    try:
        return Path.home() / ".cache" / "crate_kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no cache without a home folder: {error} Set HOME") from error


def cache_folder(sources: str) -> Path:
    """Return the user's folder for the extension of these sources, this PyTorch and this machine's architecture."""
    from torch import __version__ as torch_version

    key = hashlib.sha256(f"{sources} {torch_version} {PLATFORM}".encode()).hexdigest()[:16]
    return user_cache() / key


def find(loads: Callable[[Path], bool] = lambda place: True) -> Path | None:
    """Return the compiled extension that fits the sources and ``loads``, or None.

    An old extension in the package folder is ignored: its operators may have other arguments.
    """
    sources, places = _places()
    return next((place for place in places if fits(place, sources) and loads(place)), None)


def why_missing() -> str:
    """Say why ``find`` returns None."""
    for place in _places()[1]:
        with contextlib.suppress(OSError):
            if not _is_as_built(place, place.read_bytes()):
                return f"the C++ extension {place} is damaged: its bytes are not those that were built"
    return "the C++ extension is not built"


def _places() -> tuple[str | None, list[Path]]:
    """Return the hash of the sources, and where their extension may be."""
    folder = source_folder()
    sources = None if folder is None else source_hash(folder)
    places = [_PACKAGE / EXTENSION]
    if sources is not None:
        with contextlib.suppress(BuildError):  # no home folder
            places.append(cache_folder(sources) / EXTENSION)
    return sources, places


def fits(library: Path, sources: str | None) -> bool:
    """Return whether a library exists, is whole and as it was built, from these sources; None means any sources."""
    try:
        content = library.read_bytes()
    except OSError:  # absent, or in an unreadable folder
        return False
    as_it_was = _is_whole(content) and _is_as_built(library, content)
    return as_it_was and marker("" if sources is None else sources) in content


def put_checksum(library: Path) -> None:
    """Write down a library's checksum beside it."""
    _checksum_file(library).write_text(_checksum(library.read_bytes()), encoding="utf-8")


def _is_as_built(library: Path, content: bytes) -> bool:
    """Return whether a library's content has the checksum beside it; True if there is none, as in a wheel.

    A wheel's checksums are its installer's, and tools that repair wheels change the library.
    """
    try:
        return _checksum_file(library).read_text(encoding="utf-8") == _checksum(content)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".crc32")


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _is_whole(content: bytes) -> bool:
    """Return whether an ELF file is not truncated: a process that maps a truncated file dies of SIGBUS.

    Linkers write the table of sections last.
    """
    if content[:5] != b"\x7fELF\x02":  # not a 64-bit ELF file: the caller checks the marker
        return True
    if len(content) < 64:
        return False
    order: Literal["little", "big"] = "little" if content[5] == 1 else "big"
    offset, size, count = (int.from_bytes(content[start:stop], order) for start, stop in ((40, 48), (58, 60), (60, 62)))
    return offset + size * count <= len(content)


def marker(sources: str) -> bytes:
    """Return the bytes in a library that name its sources; empty ``sources`` give the part common to all."""
    return f"crate_kernels sources {sources}".encode() + (b"\0" if sources else b"")
