"""Benchmarks in order of worth: ``python -m tests.gpu.timing --out FOLDER --seconds S --workers N``.

Compilers take longer than what is timed: N processes first make each call once, side by side, for a part of the time,
and leave in the compilers' caches what the one process that times finds there. Every provider of one benchmark follows
the other. Each row is in the file as soon as it is timed; rows in it are not timed again. A row that ends its process
twice is left with that reason. It needs no pytest-benchmark.
"""

import faulthandler
import os
import sys
import time

import pytest
import torch

from benchmarks import bench_decode, bench_ista, bench_models, bench_mssa, bench_overhead, bench_tssa, worth
from crate_kernels.bench import clock, memory, rows
from tests.gpu import processes
from tests.gpu.suite import usable

BENCHMARKS = (
    bench_mssa.test_mssa,
    bench_tssa.test_tssa,
    bench_ista.test_ista,
    bench_decode.test_decode,
    bench_decode.test_generation_on_a_gpu,
    bench_models.test_model,
    bench_overhead.test_overhead,
)
DRY = (("overhead-tssa", "fp32", "forward"),)
LIMIT = 180  # seconds per row, compilation included; then the process ends
SECONDS = 0.3  # of calls timed per row
COMPILING = 0.35  # share of the seconds, at most
ONCE, TWICE = "did not end in time", "did not end in time, twice"


def jobs(order):
    """Return (benchmark, its parameters: what, dtype, direction, provider) in an order of benchmarks."""
    ranks = {key: rank for rank, key in enumerate(order)}
    found = []
    for benchmark in BENCHMARKS:
        (grid,) = benchmark.pytestmark
        for what, dtype, direction, provider in (p.values for p in grid.args[1]):
            if (what.name, dtype, direction) in ranks and what.runs_on("cuda"):
                rank = ranks[what.name, dtype, direction]
                found.append((rank, benchmark, (what, dtype, direction, provider)))
    return [job[1:] for job in sorted(found, key=lambda job: job[0])]


class Unrecorded:
    """The function by which benchmarks make one call of each row, so that it is compiled."""

    def __init__(self, device):
        self.device = device

    def timer(self, call, prepare):
        return [clock.once(call, prepare, self.device)]

    def timed(self, row, measure):
        try:
            measure(row, self.device, self.timer)
        except Exception as error:  # the process that times tells of it in the row
            print(f"compiling {row.key}: {type(error).__name__}: {error}"[:300], flush=True)
            if not usable():
                os._exit(70)

    def wrong(self):
        return []


class File:
    """The rows so far, and the function by which benchmarks time one more."""

    def __init__(self, path, device, machine):
        self.path, self.device = path, device
        self.results = rows.read(path) if path.exists() else rows.Results(machine(), [])
        self.again = {row.key for row in self.results.rows if row.skipped == ONCE}
        self.results.rows[:] = [row for row in self.results.rows if row.skipped != ONCE]

    def timer(self, call, prepare):
        return clock.host_seconds(call, prepare, self.device, SECONDS)

    def timed(self, row, measure):
        if any(row.key == other.key for other in self.results.rows):
            return
        row.skipped = TWICE if row.key in self.again else ONCE
        self.results.rows.append(row)
        rows.write(self.path, self.results)
        row.skipped = ""
        try:
            measure(row, self.device, self.timer)
        except Exception as error:
            row.skipped = f"{type(error).__name__}: {error}"[:500]
            row.seconds, row.loop_seconds, row.device_seconds = [], [], []
        rows.write(self.path, self.results)
        if row.skipped and not usable():
            os._exit(70)
        if row.times:
            said = ", ".join(f"{clock} {1e6 * row.on(clock):.1f}" for clock in rows.CLOCKS if row.samples(clock))
            print(f"{row.key} us: {said}", flush=True)

    def wrong(self):
        """Return the rows whose results are wrong."""
        return [row.key for row in self.results.rows if row.skipped.startswith("wrong")]


def run(file, every, deadline):
    """Time the jobs until the deadline and return the exit status."""
    for benchmark, parameters in every:
        if time.monotonic() > deadline:
            return processes.INCOMPLETE
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
        try:
            benchmark(file.timed, *parameters)
        except pytest.skip.Exception:  # the operator has no such provider
            continue
        finally:
            faulthandler.cancel_dump_traceback_later()
            if file.device.type == "cuda":
                memory.release()
    return processes.FAILED if file.wrong() else processes.DONE


def compile_all(args, deadline):
    """Make the calls of the jobs in processes side by side, each with its turn of the jobs."""
    options = ["--first", args.first, *(word for part in args.only for word in ("--only", part))]
    # One process more for each that compiles would be more processes than cores.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    start = time.monotonic()
    processes.shared("timing", args, deadline, options, lambda words: processes.start(words, environment), grace=2.0)
    print(f"timing: compiled in {time.monotonic() - start:.0f} s", flush=True)


def main(argv=None):
    parser = processes.parser(__doc__)
    parser.add_argument("--only", action="append", default=[], help="only these providers; may be repeated")
    parser.add_argument("--first", type=int, default=sys.maxsize, help="only so many jobs, from the first on")
    args = parser.parse_args(argv)
    now = time.monotonic()
    deadline = now + args.seconds
    device = torch.device("cpu" if args.dry_run else "cuda")
    every = [job for job in jobs(DRY if args.dry_run else worth.ORDER) if not args.only or job[1][-1] in args.only]
    every = every[: args.first]
    if args.worker is not None:
        return run(Unrecorded(device), every[args.worker - 1 :: args.workers], deadline)
    if args.workers > 1:
        compile_all(args, now + COMPILING * args.seconds)
    machine = (lambda: {"device": "dry run"}) if args.dry_run else (lambda: rows.machine(device, ("fp32", "bf16")))
    return run(File(args.out / "bench.json", device, machine), every, deadline)


if __name__ == "__main__":
    sys.exit(main())
