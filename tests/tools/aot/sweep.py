"""Compile, without a GPU, every kernel that the operators launch on the small and odd sizes of ``sizes.py``.

``python -m tests.tools.aot.sweep --target sm_90`` compiles each once, says which fail, and returns 1 if any does; with
Triton 3.6 by ``PYTHONPATH=.venv-triton-3.6``. Its record lets it go on where it was stopped: what was compiled before,
of the same source, is not compiled again. More ``--draws`` are more calls.

A compiler can end the whole process, so a child process compiles; it notes each kernel before it begins with it.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton
from triton import knobs

from crate_kernels._core import files
from tests.tools.aot import harness, sizes

TENSOR_MEMORY = 512  # columns that a multiprocessor of sm_100 has
_UNFINISHED = "the compiler ended the process"


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: the call that launches it, the launch, and the target."""

    call: str
    launch: harness.Launch
    target: str

    @cached_property
    def source(self) -> triton.compiler.ASTSource:
        """The source, specialised for the launch's arguments."""
        return harness.source_of(self.launch, harness.TARGETS[self.target])

    @cached_property
    def key(self) -> str:
        """What the compiler gets: equal for launches that share a kernel, another after a change of the source."""
        return f"{self.source.hash()} {sorted(self.launch.options.items())}"

    @property
    def steps(self) -> set[str]:
        """The names of the arguments that are true: what of a kernel's steps it does."""
        return {name for name, value in self.launch.arguments.items() if value is True}

    def __str__(self) -> str:
        tile = [f"{name}={value}" for name, value in self.launch.arguments.items() if name.startswith("BLOCK")]
        said = ", ".join((*sorted(self.steps), *tile, f"{self.launch.options.get('num_warps', 4)} warps"))
        return f"{self.launch.function.__name__}({said}) of {self.call}"


def kernels(target: str, calls: Iterator[tuple[str, object]]) -> list[Kernel]:
    """Return the kernels that calls launch on ``target``, each once."""
    found = {}
    for name, call in calls:
        for launch in harness.launches(call, target):
            kernel = Kernel(name, launch, target)
            found.setdefault(kernel.key, kernel)
    return list(found.values())


@contextmanager
def _quiet(said):
    """Send what the process writes to its standard error, the compiler's C++ code included, into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(said.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def fault(kernel: Kernel) -> str:
    """Compile a kernel; return why it cannot be launched, or nothing."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            with _quiet(said):
                compiled = triton.compile(
                    kernel.source, target=harness.TARGETS[kernel.target], options=kernel.launch.options
                )
        except Exception as error:
            said.seek(0)
            first = next((line.strip() for line in said if "error:" in line), "")
            return f"{type(error).__name__}: {first or str(error).strip()[:300]}"
    shared, columns = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
    if shared > harness.SHARED_LIMIT[kernel.target]:
        return f"{shared} bytes of shared memory, {harness.SHARED_LIMIT[kernel.target]} there are"
    return f"{columns} columns of tensor memory, {TENSOR_MEMORY} there are" if columns > TENSOR_MEMORY else ""


class Record:
    """What was compiled, a line per event: a kernel's key as it begins, then with its fault, "" for none."""

    def __init__(self, path: Path) -> None:
        self.path, self.faults, self.begun = path, {}, None
        if path.exists():
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if "fault" in event:
                    self.faults[event["kernel"]] = event["fault"]
                self.begun = None if "fault" in event else event["kernel"]

    def begin(self, key: str) -> None:
        """Note that a kernel is being compiled."""
        self._write({"kernel": key})

    def end(self, key: str, reason: str) -> None:
        """Note the fault of a kernel, "" for none."""
        self.faults[key] = reason
        self._write({"kernel": key, "fault": reason})

    def _write(self, event: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def compile_all(target: str, draws: int, part: str, path: Path, until: float) -> None:
    """Compile what the record lacks, until the clock says ``until``. Compiled code is not kept: the record is."""
    record, parent = Record(path), multiprocessing.parent_process()
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        for kernel in kernels(target, sizes.calls(draws, part)):
            if time.time() > until or (parent and not parent.is_alive()):
                return
            if kernel.key not in record.faults:
                record.begin(kernel.key)
                record.end(kernel.key, fault(kernel))


def run(target: str, draws: int, part: str, path: Path, until: float, work=compile_all) -> None:
    """Compile in child processes: the kernel at which one ends has that as its fault, and another resumes."""
    while True:
        child = multiprocessing.get_context("spawn").Process(target=work, args=(target, draws, part, path, until))
        child.start()
        child.join()
        if not child.exitcode:
            return
        record = Record(path)
        if record.begun is None:
            raise RuntimeError(f"sweep: a child process failed outside the compiler, exit code {child.exitcode}")
        record.end(record.begun, _UNFINISHED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90", choices=harness.TARGETS)
    parser.add_argument("--draws", type=int, default=1, help="calls per pair of sizes")
    parser.add_argument("--part", default="", help="only forms whose names have this part, as tssa.causal")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--out", type=Path, default=Path("build/sweep"), help="the folder of the records")
    args = parser.parse_args()
    path = args.out / f"triton-{triton.__version__}-{args.target}.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(path):
            run(args.target, args.draws, args.part, path, time.time() + 60 * args.minutes)
    except files.InUse as error:
        print(error)
        return 1
    every, faults = kernels(args.target, sizes.calls(args.draws, args.part)), Record(path).faults
    done = [kernel for kernel in every if kernel.key in faults]
    failed = [kernel for kernel in done if faults[kernel.key]]
    for kernel in failed:
        print(f"{kernel}: {faults[kernel.key]}")
    for name, count in sorted(Counter(kernel.launch.function.__name__ for kernel in done).items()):
        print(f"{name}: {count} compiled, {sum(k.launch.function.__name__ == name for k in failed)} failed")
    print(f"Triton {triton.__version__}, {args.target}: {len(done)} of {len(every)} compiled, {len(failed)} failed")
    return 1 if failed or len(done) < len(every) else 0


if __name__ == "__main__":
    sys.exit(main())
