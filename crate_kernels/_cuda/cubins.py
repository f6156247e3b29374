"""Compiles kernels, once for all processes of a user: the results are kept in the user's cache.

A file has a line that says what it is, and the binary. Its name is a hash of all that decides the binary. Where the
cache cannot be read or written, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from crate_kernels._core import files
from crate_kernels._cuda import sources
from crate_kernels._cuda.records import Record
from crate_kernels._cuda.sources import Kernel
from crate_kernels._native import libraries, nvrtc
from crate_kernels._native.libraries import BuildError
from crate_kernels._native.nvrtc import Compiled, Nvrtc

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--diag-suppress=177,20012")
# Functions are optimised apart: without, mssa's backward at 64 channels spills 12 bytes on sm_80. It costs a pass of
# tssa 4 registers on sm_90, and saves another 2 on sm_80: as many blocks fit a multiprocessor.
_APART, _APART_SINCE = "--split-compile=2", (13, 0)
_MAX_BYTES, _MAX_FILES = 256 << 20, 4096  # of the cache: the files that were used last stay
_PATIENCE = 120.0  # seconds to wait for another process that compiles the same


def options(compiler: Nvrtc) -> tuple[str, ...]:
    """Return the options by which kernels are compiled."""
    return (*OPTIONS, _APART) if compiler.version >= _APART_SINCE else OPTIONS


def folder() -> Path:
    """Return the folder of compiled kernels.

    Raises:
        BuildError: there is no home folder.
    """
    return libraries.user_cache() / "kernels"


def compiled(
    kernel: Kernel, capability: int, records: Sequence[type[Record]] = (), compiler: Nvrtc | None = None
) -> tuple[bytes, str]:
    """Return a kernel's binary for a GPU of a compute capability, as 90 for 9.0, and the kernel's name in it.

    ``records`` are checked against the device code's structs; ``compiler`` is by default that of this process.

    Raises:
        BuildError: the sources are not installed.
        nvrtc.Unavailable: there is no NVRTC.
        nvrtc.NotCompiled: it does not compile for this GPU.
    """
    compiler = nvrtc.library() if compiler is None else compiler
    architecture = compiler.architecture(capability)
    source, headers = sources.unit(kernel, records), sources.headers(kernel.header)

    def compile_it() -> Compiled:
        return compiler.compile(source, architecture, options(compiler), headers, [kernel.name])

    known = (compiler.version, architecture, options(compiler), kernel, source, sorted(headers.items()))
    key = hashlib.sha256(repr(known).encode()).hexdigest()[:32]
    try:
        path = folder() / f"{key}.{'ptx' if architecture.startswith('compute_') else 'cubin'}"
        path.parent.mkdir(parents=True, exist_ok=True)
    except (BuildError, OSError):
        result = compile_it()
    else:
        result = _read(path) or _compiled_once(path, compile_it)
    return result.binary, result.names[kernel.name]


def _compiled_once(path: Path, compile_it) -> Compiled:
    """Compile and write the file; of several processes one does, and the others wait for it."""
    with _alone(path):
        found = _read(path)
        if found is None:
            found = compile_it()
            with contextlib.suppress(OSError):  # read-only, or full
                files.put(path, _serialized(found))
                _shrink(path.parent)
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from compiling the same; where there are no locks, or after a while, do not."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # InUse too
            stack.enter_context(files.owned(path, _PATIENCE))
        yield


def _checksum(names: dict[str, str], binary: bytes) -> str:
    return f"{zlib.crc32(binary, zlib.crc32(json.dumps(names).encode())):08x}"


def _serialized(result: Compiled) -> bytes:
    facts = {"names": result.names, "crc32": _checksum(result.names, result.binary), "bytes": len(result.binary)}
    return json.dumps(facts).encode() + b"\n" + result.binary


def _read(path: Path) -> Compiled | None:
    """Return what a file holds; None if it is not there, or not whole."""
    try:
        line, _, binary = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        if (len(binary), _checksum(facts["names"], binary)) != (facts["bytes"], facts["crc32"]):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return Compiled(binary, facts["names"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _shrink(place: Path) -> None:
    """Remove the files that were not used for the longest time, until the others are few and small enough."""
    known = []
    for path in place.iterdir():
        with contextlib.suppress(OSError):  # another process removes too
            if path.suffix in (".cubin", ".ptx"):
                status = path.stat()
                known.append((status.st_mtime, status.st_size, path))
    known.sort()
    size = sum(each for _, each, _ in known)
    for number, (_, each, path) in enumerate(known):
        if size <= _MAX_BYTES and len(known) - number <= _MAX_FILES:
            return
        size -= each
        with contextlib.suppress(OSError):
            path.unlink()
            logging.getLogger("crate_kernels").debug("crate_kernels: %s is removed: the cache is full", path)
