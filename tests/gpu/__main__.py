"""One command for a quarter of an hour on a GPU: ``python -m tests.gpu --minutes 13 --out FOLDER``, or ``make gpu``.

It needs PyTorch, Triton, NumPy, pytest 9 and, to compile the C++ extension, a compiler and the package ninja; no git
and no network. Seven parts follow one another, each for at most its minutes: a smoke test, the test suite in processes
side by side, probes of the hardware, the host's time, tuning, reports of kernels over their estimates, and with what
time is left the benchmarks in order of worth. Results are in FOLDER as soon as they are known. Started again with the
same folder, the run resumes where it ended: minutes that a part has had are counted in ``progress.json``.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from crate_kernels._core import files
from tests.gpu import lines, processes

STATUS = {
    processes.DONE: "done",
    processes.FAILED: "failed",
    processes.INCOMPLETE: "time was up",
    processes.BROKEN: "broken",
}
# Compiles the C++ extension unless one fits these sources, such as one copied along with them.
BUILD = """from crate_kernels import cli
from crate_kernels._native import extension
extension.PATH or cli.main(["build"])
"""
RESERVE = 45.0  # seconds at the end for what is running, and for the summary
MIN_SECONDS = 10.0  # seconds worth starting a part for


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        name: of its module, ``tests.gpu.<name>``.
        minutes: the maximum that it gets before the parts after it; what is left at the end is shared in order.
    """

    name: str
    minutes: float


# On an H200 with 16 cores, smoke ended within a minute, and the suite within four.
PARTS = (
    Part("smoke", 1.5),
    Part("suite", 4),
    Part("probes", 0.75),
    Part("host", 0.5),
    Part("tuning", 2.25),
    Part("ncu", 0.75),
    Part("timing", math.inf),
)


class State:
    """What earlier calls of the command did, in ``progress.json``."""

    def __init__(self, folder):
        self.path = folder / "progress.json"
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.parts = {part.name: {"seconds": 0.0, "status": ""} | known.get(part.name, {}) for part in PARTS}

    def add(self, name, seconds, status):
        """Write the end of a part's turn."""
        own = self.parts[name]
        own |= {"seconds": round(own["seconds"] + seconds, 1), "status": STATUS[status]}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.parts, indent=1) + "\n")
        partial.replace(self.path)

    def left(self, part, everything):
        """Return the seconds that a part may still take: none if it is complete."""
        own = self.parts[part.name]
        if own["status"] in ("done", "failed"):
            return 0.0
        return math.inf if everything else max(60 * part.minutes - own["seconds"], 0.0)


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=13.0, help="of this call; 13 by default")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; resumes from what is in it")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes side by side; two fewer than cores by default"
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="only this part; may be repeated")
    parser.add_argument("--candidates", type=Path, help="configurations to tune, as tune --candidates takes them")
    parser.add_argument("--dry-run", action="store_true", help="the same on the CPU, interpreted, on tiny shapes")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes:g}")
    args.only = args.only or names
    args.workers = args.workers or (1 if args.dry_run else max(min(len(os.sched_getaffinity(0)) - 2, 14), 1))
    return args


def command(part, args, seconds):
    """Return the command of a part's turn."""
    found = ["-m", f"tests.gpu.{part.name}", "--out", args.out.resolve()]
    found += ["--seconds", round(seconds, 1), "--workers", args.workers]
    found += ["--candidates", args.candidates.resolve()] if part.name == "tuning" and args.candidates else []
    return found + (["--dry-run"] if args.dry_run else [])


def turns(state, deadline, run, ready=lambda: None, parts=PARTS):
    """Give each part its minutes, then what is left to the parts that are not complete, in order.

    ``ready`` waits for what every part but the smoke test needs, which takes none of their minutes.
    """
    for everything in (False, True):
        for part in parts:
            if part is not PARTS[0]:
                ready()
            seconds = min(state.left(part, everything), deadline - time.monotonic())
            if seconds < MIN_SECONDS:
                continue
            start = time.monotonic()
            status = run(part, seconds)
            state.add(part.name, time.monotonic() - start, status)


def summary(folder, state):
    """Return the lines that a run prints in the end."""
    found = []
    for name, own in state.parts.items():
        results = lines.results(folder / f"{name}.jsonl").values()
        outcomes = [line["outcome"] for line in results]
        counts = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
        found.append(
            f"gpu: {name}: {own['status'] or 'not begun'}, {own['seconds']:.0f} s" + f": {counts}" * bool(counts)
        )
    return found


def main(argv=None):
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes - RESERVE * (not args.dry_run)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(args.out):
            return run_all(args, deadline)
    except files.InUse as error:
        print(f"gpu: {error}")
        return 1


def run_all(args, deadline):
    """Give all parts their turns; return the exit status."""
    state = State(args.out)
    # Triton reads the variable on import. The C++ extension, which repeats later calls, is compiled beside the first
    # part, where no call is a later one.
    environment = {"TRITON_INTERPRET": "1"} if args.dry_run else {}
    compiling = None if args.dry_run else processes.start(["-c", BUILD], apart=True)

    def start(arguments):
        return processes.start(arguments, environment, apart=True)

    def run(part, seconds):
        print(f"gpu: {part.name}: {seconds / 60:.1f} minutes at most", flush=True)
        stop_at = time.monotonic() + seconds
        # A part ends its processes before it is ended.
        return processes.side_by_side(
            [lambda left: command(part, args, left)], stop_at, start, grace=2 * processes.GRACE
        )

    def ready():
        with contextlib.suppress(subprocess.TimeoutExpired):
            if compiling is not None:
                compiling.wait(max(deadline - time.monotonic(), 0.0))

    try:
        turns(state, deadline, run, ready, [part for part in PARTS if part.name in args.only])
    finally:
        if compiling is not None:
            processes.end(compiling)
    print("\n".join(summary(args.out, state)))
    statuses = [state.parts[name]["status"] for name in args.only]
    if {"failed", "broken"} & {*statuses}:
        return 1
    return processes.DONE if set(statuses) == {"done"} else processes.INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
