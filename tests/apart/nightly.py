"""Make 10,000 drawn calls of each operator on each backend, some processes side by side, and print what came of them.

A log per operator, backend and process has each call's seed. The same command goes on where it was stopped; a process
that dies in a call is started again after it, and the call counts as failed. ``python -m tests.apart --seed N --backend
B`` repeats a call; of Triton under TRITON_INTERPRET=1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crate_kernels._core import files
from tests.apart.__main__ import OUTPUT, STATUSES, digest
from tests.apart.draw import OPERATORS
from tests.tools import bound

BACKENDS = ("cpp", "composite", "reference", "emulated", "triton")
INCOMPLETE = 3  # exit status: nothing failed, but time was up
BAD = ("failed", "broken")


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.apart.nightly", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="of each operator on each backend (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--op", action="append", choices=OPERATORS, help="only this operator; may be repeated")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this backend; may be repeated")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes side by side")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on from there")
    parser.add_argument("--out", type=Path, help=f"folder of the logs (default {OUTPUT}/nightly-<hash of the sources>)")
    arguments = parser.parse_args()
    out = arguments.out or OUTPUT / f"nightly-{digest()}"
    out.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(out):
            return make(arguments, out)
    except files.InUse as error:
        print(error)
        return 1


def make(arguments, out):
    """Make the calls that ``arguments`` ask for; return the exit status."""
    stop_at = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    cells = [(op, backend) for backend in arguments.backend or BACKENDS for op in arguments.op or OPERATORS]

    def work(job):
        for op, backend in cells:
            part(arguments, out, op, backend, job, stop_at)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(work, range(1, arguments.jobs + 1)))
    return table(cells, {cell: records(out, *cell) for cell in cells}, arguments.calls, out)


def part(arguments, out, op, backend, job, stop_at):
    """Make one process's calls of one operator and backend; start it again where it dies in one of them."""
    log = out / f"{op.replace(' ', '-')}-{backend}-{job}of{arguments.jobs}.jsonl"
    log.with_suffix(".running").unlink(missing_ok=True)  # a run that was stopped ended its processes within their calls
    command = ["-m", "tests.apart", "--op", op, "--backend", backend, "--log", log]
    command += ["--calls", arguments.calls, "--start", arguments.start, "--shard", f"{job}/{arguments.jobs}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(backend == "triton"))}
    died = 0
    while died < 20 and (stop_at is None or time.monotonic() < stop_at):
        left = [] if stop_at is None else ["--minutes", (stop_at - time.monotonic()) / 60]
        with log.with_suffix(".txt").open("a") as text:
            done = subprocess.run(bound.command(*command, *left), stdout=text, stderr=text, env=environment)
        if done.returncode >= 0:
            break
        died += 1


def records(out, op, backend):
    """Return the records of one operator and backend by seed, from the logs of every process."""
    found = {}
    for log in out.glob(f"{op.replace(' ', '-')}-{backend}-*of*.jsonl"):
        found.update((record["seed"], record) for record in map(json.loads, log.read_text().splitlines()))
    return found


def table(cells, found, calls, out):
    """Print how many calls of each operator, on each backend, came to what; return the exit status."""
    head = "".join(f"{status:>9}" for status in STATUSES)
    print(f"{'operator':<20}{'backend':<12}{'calls':>8}{head}   largest error in budgets, of seed   ms a call")
    total = Counter()
    for op, backend in cells:
        rows = list(found[op, backend].values())
        for row in rows:
            if row["why"].startswith("unavailable"):
                row["status"] = "broken"  # every backend that is asked for is to be here
        count = Counter(row["status"] for row in rows)
        total += count
        worst = max(rows, key=lambda row: row["ratio"], default={"ratio": 0.0, "seed": "-"})
        mean = sum(row["ms"] for row in rows) / max(len(rows), 1)
        line = "".join(f"{count[status] or '':>9}" for status in STATUSES)
        print(f"{op:<20}{backend:<12}{len(rows):>8}{line}{worst['ratio']:>14.3g}{worst['seed']:>14}{mean:>18.0f}")
    for (op, backend), rows in found.items():
        for row in sorted(rows.values(), key=lambda row: row["seed"]):
            if row["status"] in BAD:
                print(f"{op} on {backend}, seed {row['seed']} ({row['kind']}, {row['dtype']}): {row['why'][:200]}")
    bad, left = sum(total[status] for status in BAD), len(cells) * calls - total.total()
    print(f"{total.total()} calls, {bad} failed, {max(left, 0)} left; logs: {out}")
    return 1 if bad else INCOMPLETE if left > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
