"""Compiles sources into one library with ninja, which recompiles only what changed.

Object files stay in their own folder between builds. ninja compares modification times, but archives and package caches
restore old times. So ninja reads a copy of the sources, in which a file is rewritten only if its content changed. The
copy is compiled by relative paths: messages and libraries name `csrc/...` and no folder of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from .libraries import PLATFORM, BuildError

_UNUSED_DAYS = 30
_ONE_LINE = 1 << 20  # wider than any command: ninja_syntax loses spaces within quotes where it breaks a line

COMPILING = "compiling"  # the first line of progress
Show = Callable[[str], object]


class Objects(NamedTuple):
    """A folder of object files that this process has locked."""

    folder: Path
    sources: Path  # the copy to compile
    origin: Path  # the original sources
    lock: IO[str]


class Recipe(NamedTuple):
    """The commands that make one library."""

    sources: Sequence[str]  # relative paths; ninja starts them in this order
    compile: Sequence[str]
    link: Sequence[str]
    libraries: Sequence[str]  # the end of the link command, behind the objects
    extra: Mapping[str, Sequence[str]] = {}  # options of single sources


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Hold the lock of a folder; create the folder if necessary. The system releases the lock of a dead process.

    Raises:
        BuildError: the folder cannot be written to.
    """
    import fcntl  # absent on Windows, where the package works without the extension

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115  # closed below
    except OSError as error:
        raise BuildError(
            f"the user's cache cannot be written: {error}; set XDG_CACHE_HOME or HOME to a folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@contextlib.contextmanager
def open_objects(root: Path, origin: Path, *identity: str) -> Iterator[Objects]:
    """Lock the folder of object files of some sources, with an up-to-date copy of the sources in it.

    Each checkout has its own folder in ``root``, so that two checkouts do not overwrite each other's objects.
    ``identity`` are inputs whose change ninja does not see, such as the compiler's version.
    """
    key = hashlib.sha256(repr((str(origin.resolve()), PLATFORM, *identity)).encode()).hexdigest()[:16]
    folder = root / f"objects-cpu-{key}"
    with locked(folder) as lock:
        _copy_changed(origin, folder / "csrc")
        yield Objects(folder, folder / "csrc", origin, lock)
    _empty_unused(root)


def build(objects: Objects, recipe: Recipe, target: Path, show: Show) -> None:
    """Compile and link changed sources; put the library at ``target``, atomically.

    Raises:
        BuildError: ninja is missing, or a command fails.
    """
    _write_ninja(recipe, objects.folder / "build.ninja")
    _write_compile_commands(recipe, objects)
    _run_ninja(objects, show)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        copied = shutil.copy(objects.folder / "library.so", scratch)
        with open(copied, "rb") as file:
            os.fsync(file.fileno())  # a power cut must not leave a partial file
        os.replace(copied, target)


def _copy_changed(origin: Path, copy: Path) -> None:
    wanted = {path.relative_to(origin): path.read_bytes() for path in origin.rglob("*") if path.is_file()}
    there = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for name in there.keys() - wanted.keys():
        (copy / name).unlink()
    for name, content in wanted.items():
        if there.get(name) != content:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)


def _write_ninja(recipe: Recipe, path: Path) -> None:
    try:
        from ninja import ninja_syntax
    except ImportError as error:
        raise BuildError("ninja is not installed: pip install ninja") from error

    def words(command: Sequence[str]) -> str:
        return ninja_syntax.escape(shlex.join(command))

    with open(path, "w") as file:
        writer = ninja_syntax.Writer(file, _ONE_LINE)  # pyright: ignore[reportArgumentType]  # its stub says str
        command = f"{words(recipe.compile)} $extra -MD -MF $out.d -c $in -o $out"
        writer.rule("compile", command, description="$in", depfile="$out.d", deps="gcc")
        writer.rule("link", f"{words(recipe.link)} $in {words(recipe.libraries)} -o $out", description="$out")
        for source in recipe.sources:
            extra = {"extra": words(recipe.extra.get(source, ()))}
            writer.build([f"{source}.o"], "compile", [f"csrc/{source}"], variables=extra)
        writer.build(["library.so"], "link", [f"{source}.o" for source in recipe.sources])


def _write_compile_commands(recipe: Recipe, objects: Objects) -> None:
    """Write a compilation database for editors, with the original sources instead of their copies."""
    entries = [
        {
            "directory": str(objects.origin),
            "file": source,
            "arguments": [*recipe.compile, *recipe.extra.get(source, ()), "-c", source],
        }
        for source in recipe.sources
    ]
    (objects.folder / "compile_commands.json").write_text(json.dumps(entries, indent=1))


def _run_ninja(objects: Objects, show: Show) -> None:
    import ninja

    show(COMPILING)
    said = []
    with subprocess.Popen(
        [os.path.join(ninja.BIN_DIR, "ninja"), "-j", str(_jobs())],
        cwd=objects.folder,
        env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # If this process is killed, the folder stays locked until its compilers end.
        pass_fds=(objects.lock.fileno(),),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if re.match(r"\[\d+/\d+\] ", line):
                    show(line.rstrip())
                else:
                    said.append(line)
        except BaseException:  # Ctrl-C, for example
            process.send_signal(signal.SIGINT)  # ninja then stops its compilers and removes unfinished files
            process.communicate()
            raise
    if process.returncode != 0:
        raise BuildError("".join(said))


def _jobs() -> int:
    """Return how many compilers may run at once: MAX_JOBS, as in PyTorch's extensions, or one per core."""
    asked = os.environ.get("MAX_JOBS")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise BuildError(f"MAX_JOBS must be a positive integer, got {asked!r}")
    if asked:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _empty_unused(root: Path) -> None:
    """Empty the object folders that no build has locked for a month; their `lock` files stay."""
    import fcntl

    for folder in root.glob("objects-*"):
        lock = folder / "lock"
        with contextlib.suppress(OSError), open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if the folder is in use
            if time.time() - lock.stat().st_mtime > _UNUSED_DAYS * 86400:
                for path in set(folder.iterdir()) - {lock}:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
