"""Judge thousands of drawn calls and of corrupted model folders: ``python -m tests.fuzz``; or repeat the one of a seed.

A cell is an operator on a backend, all classes of calls on drawn backends ("any"), or the folders ("loaders").
Processes share a cell's seeds, each with another log. The same command resumes. A process that dies in a seed has
failed there, and another continues after it. ``--seed N --backend B`` repeats a call; Triton needs TRITON_INTERPRET=1.
"""

import argparse
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from crate_kernels._core import files
from tests.apart import judge as calls
from tests.apart.call import HOPPER
from tests.apart.draw import OPERATORS, draw, seeds_of
from tests.apart.machines import quiet, ready
from tests.loaders import folders
from tests.loaders import judge as corrupted
from tests.tools import bound
from tests.tools.sources import ROOT, digest

OUTPUT = Path("fuzz-output")
SOURCES = ("crate_kernels", "csrc", "tests/apart", "tests/loaders")
ANY, LOADERS = "any", "loaders"
BACKENDS = (ANY, "cpp", "composite", "reference", "emulated", *HOPPER, "triton", LOADERS)
STATUSES = ("passed", "close", "refused", "limit", "loaded", "failed", "broken")
BAD = ("failed", "broken")
INCOMPLETE = 3  # exit status: nothing failed, but time was up
MAX_DEATHS = 20  # of a process's turn at a cell


def parse(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the call, or with --backend loaders the folder, of one seed")
    parser.add_argument("--calls", type=int, default=10_000, help="seeds of each cell (default %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--op", action="append", choices=OPERATORS, help="only this operator; may be repeated")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes side by side")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command resumes")
    parser.add_argument("--out", type=Path, help=f"folder of the logs (default {OUTPUT}/<hash of the sources>)")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # which of the jobs, from 1, of the one cell
    return parser.parse_args(argv)


def cells(ops, backends):
    """List (operator, backend); "any" and the loaders have no operator."""
    found = []
    for backend in backends or BACKENDS:
        found += [("", backend)] if backend in (ANY, LOADERS) and not ops else []
        every = OPERATORS if backend not in HOPPER else ("mssa",)
        found += [(op, backend) for op in ops or every if op in every] if backend not in (ANY, LOADERS) else []
    return found


def seeds(op, start, count):
    """Yield the first seeds of a cell."""
    return itertools.islice(seeds_of(op, start) if op else itertools.count(start), count)


@contextmanager
def judging(backend):
    """Return a function that judges a seed: a record of what came of it, and its text."""
    torch.set_num_threads(1)
    if backend == LOADERS:
        warnings.simplefilter("error")
        with tempfile.TemporaryDirectory() as scratch:
            (sound := Path(scratch) / "sound").mkdir()
            every = folders.write(sound)

            def folder(seed):
                verdict = corrupted.judge(seed, every, Path(scratch))
                return {"kind": "folder", **verdict._asdict(), "ratio": 0.0}, verdict.why

            yield folder
        return
    forced = None if backend == ANY else backend
    quiet()
    with ready(forced):

        def call(seed):
            drawn = draw(seed, forced)
            found = calls.judge(drawn)
            said = {"kind": f"{drawn.kind}, {drawn.backend}, {drawn.dtype}", "status": found.status, "why": found.why}
            return {**said, "ratio": found.ratio}, drawn.source()

        yield call


def work(arguments, out):
    """Judge one process's seeds of the one cell, but for those that the log has."""
    ((op, backend),) = cells(arguments.op, arguments.backend)
    log = log_of(out, op, backend, arguments.child, arguments.jobs)
    known, stop = read(log), time.monotonic() + 60 * (arguments.minutes or float("inf"))
    with judging(backend) as judge:
        for seed in itertools.islice(
            seeds(op, arguments.start, arguments.calls), arguments.child - 1, None, arguments.jobs
        ):
            if seed in known:
                continue
            if time.monotonic() > stop:
                break
            running(log).write_text(str(seed))
            start = time.monotonic()
            append(log, seed, **judge(seed)[0], ms=round(1e3 * (time.monotonic() - start), 1))
    running(log).unlink(missing_ok=True)
    return 0


def part(arguments, out, op, backend, job, stop_at):
    """Have one process's seeds of a cell judged; start it again where it dies in one of them."""
    log = log_of(out, op, backend, job, arguments.jobs)
    running(log).unlink(missing_ok=True)  # a run that was stopped ended its processes within their calls
    command = ["-m", "tests.fuzz", "--backend", backend, "--out", out, "--child", job, "--jobs", arguments.jobs]
    command += ["--calls", arguments.calls, "--start", arguments.start, *(["--op", op] if op else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(backend == "triton"))}
    for _ in range(MAX_DEATHS):
        if stop_at is not None and time.monotonic() > stop_at:
            break
        left = [] if stop_at is None else ["--minutes", (stop_at - time.monotonic()) / 60]
        with log.with_suffix(".txt").open("a") as text:
            done = subprocess.run(bound.command(*command, *left), cwd=ROOT, stdout=text, stderr=text, env=environment)
        if not done.returncode or not running(log).exists():
            break
        seed = int(running(log).read_text())
        append(log, seed, kind="-", status="failed", why="the process ended in it", ratio=0.0, ms=0.0)


def log_of(out, op, backend, job, jobs):
    return out / f"{op.replace(' ', '-') or 'all'}-{backend}-{job}of{jobs}.jsonl"


def running(log):
    """Return the file of the seed that is being judged, which a process that dies in it leaves behind."""
    return log.with_suffix(".running")


def append(log, seed, **record):
    with log.open("a") as file:
        file.write(json.dumps({"seed": seed, **record}) + "\n")


def read(log):
    """Return the records of a log by their seeds."""
    lines = log.read_text().splitlines() if log.exists() else ()
    return {record["seed"]: record for record in map(json.loads, lines)}


def table(found, count, out):
    """Print what came of each cell's seeds; return the exit status."""
    head = "".join(f"{status:>9}" for status in STATUSES)
    print(f"{'operator':<20}{'backend':<12}{'seeds':>8}{head}   largest error / tolerance, of seed    ms each")
    total = Counter()
    for (op, backend), rows in found.items():
        for row in rows.values():
            if backend != ANY and row["why"].startswith("unavailable"):
                row["status"] = "broken"  # every backend that is asked for is to be here
        counts = Counter(row["status"] for row in rows.values())
        total += counts
        worst = max(rows.values(), key=lambda row: row["ratio"], default={"ratio": 0.0, "seed": "-"})
        mean = sum(row["ms"] for row in rows.values()) / max(len(rows), 1)
        line = "".join(f"{counts[status] or '':>9}" for status in STATUSES)
        print(
            f"{op or 'all':<20}{backend:<12}{len(rows):>8}{line}{worst['ratio']:>14.3g}{worst['seed']:>14}{mean:>18.0f}"
        )
    for (op, backend), rows in found.items():
        for row in sorted(rows.values(), key=lambda row: row["seed"]):
            if row["status"] in BAD:
                print(f"{op or 'all'} on {backend}, seed {row['seed']} ({row['kind']}): {row['why'][:200]}")
    bad, left = sum(total[status] for status in BAD), len(found) * count - total.total()
    print(f"{total.total()} seeds, {bad} failed, {max(left, 0)} left; logs: {out}")
    return 1 if bad else INCOMPLETE if left > 0 else 0


def repeat(seed, backend):
    """Print the call or the folder of ``seed`` and what comes of it."""
    with judging(backend) as judge:
        record, text = judge(seed)
    print(f"{text}\n# {record['kind']}, seed {seed}: {record['status']} {record['why']}")
    return int(record["status"] in BAD)


def main(argv=None):
    """Run the command line; return the exit status."""
    arguments = parse(argv)
    if arguments.seed is not None:
        return repeat(arguments.seed, (arguments.backend or [ANY])[0])
    out = arguments.out or OUTPUT / digest(*SOURCES)
    if arguments.child:
        return work(arguments, out)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    stop_at = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    every = cells(arguments.op, arguments.backend)

    def turn(job):
        for op, backend in every:
            part(arguments, out, op, backend, job, stop_at)

    try:
        with files.owned(out):
            with ThreadPoolExecutor(arguments.jobs) as pool:
                list(pool.map(turn, range(1, arguments.jobs + 1)))
            found = {cell: {} for cell in every}
            for op, backend in every:
                for log in out.glob(log_of(out, op, backend, "*", "*").name):
                    found[op, backend] |= read(log)
            return table(found, arguments.calls, out)
    except files.InUse as error:
        print(error)
        return 1


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
