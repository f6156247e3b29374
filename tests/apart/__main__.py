"""Make drawn calls, log each, and say what came of them; or repeat the one of a seed."""

import argparse
import faulthandler
import hashlib
import itertools
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch

import crate_kernels
from crate_kernels._core import files
from tests.apart.draw import OPERATORS, ORDER, draw, seeds_of
from tests.apart.judge import Verdict, judge
from tests.apart.machines import ready

OUTPUT = Path("apart-output")
STATUSES = ("passed", "close", "refused", "limit", "failed", "broken")


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.apart", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the call of one seed and print it as Python")
    parser.add_argument("--calls", type=int, default=20_000, help="how many seeds to go through (default %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on from there")
    parser.add_argument("--kind", default="", help="only classes whose name has this in it")
    parser.add_argument("--op", choices=OPERATORS, help="as many calls of this operator alone")
    parser.add_argument("--shard", default="1/1", help="I/N: each N-th of the seeds, from the I-th (default all)")
    parser.add_argument("--backend", help='every call on this backend; "none" leaves the choice to the package')
    parser.add_argument("--log", type=Path, help=f"log of the calls (default {OUTPUT}/<hash of the sources>.jsonl)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    with ready(arguments.backend):
        if arguments.seed is not None:
            return repeat(arguments.seed, arguments.backend)
        return make(arguments)


def make(arguments):
    """Make the calls that ``arguments`` ask for; return the exit status."""
    log = arguments.log or OUTPUT / f"{digest()}{'-' + arguments.backend if arguments.backend else ''}.jsonl"
    first, parts = map(int, arguments.shard.split("/"))
    seeds = seeds_of(arguments.op, arguments.start) if arguments.op else itertools.count(arguments.start)
    seeds = itertools.islice(seeds, first - 1, arguments.calls, parts)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(log):
            records = run([s for s in seeds if arguments.kind in ORDER[s % len(ORDER)][1]], log, arguments)
    except files.InUse as error:
        print(error)
        return 1
    return summary(records, log)


def quiet():
    """Make warnings errors, as in the suite, but for those that are of no concern."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*batching rule", UserWarning)  # vmap is documented to be a loop
    warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)  # NumPy warns of NaN in Triton's interpreter
    warnings.filterwarnings("ignore", ".torch.jit.script", DeprecationWarning)  # torch.func.jvp calls it


def repeat(seed, backend):
    """Print the call of ``seed`` and what comes of it."""
    call = draw(seed, backend)
    verdict = judge(call)
    print(call.source())
    print(f"# {call.kind}, seed {seed}: {verdict.status} {verdict.why}")
    return int(verdict.status in ("failed", "broken"))


def digest():
    """Return a name for the sources that are tested and that test: a log holds for no others."""
    found = hashlib.sha256()
    package = Path(crate_kernels.__file__).parent
    here = Path(__file__).parent
    for folder, ends in ((package, "*.py"), (package.parent / "csrc", "*.[ch]*"), (here, "*.py")):
        for path in sorted(folder.rglob(ends)):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def run(seeds, log, arguments):
    """Make the calls that the log does not have yet; return the records of all."""
    running = log.with_suffix(".running")  # seed of the present call, which a process that dies in it leaves behind
    records = {}
    if log.exists():
        records = {record["seed"]: record for record in map(json.loads, log.read_text().splitlines())}
    start = time.monotonic()
    with log.open("a") as file, (log.with_suffix(".crash")).open("w") as crash:
        faulthandler.enable(crash)
        for number, seed in enumerate(seeds):
            if seed in records:
                continue
            if arguments.minutes and time.monotonic() - start > 60 * arguments.minutes:
                print(f"Time is up after {number} of {len(seeds)} calls; the same command goes on.")
                break
            call = draw(seed, arguments.backend)
            if running.exists() and running.read_text() == str(seed):
                verdict = Verdict("failed", "the process ended in this call")
            else:
                running.write_text(str(seed))
                verdict = judge(call)
            record = {
                "seed": seed, "kind": call.kind, "op": call.op, "backend": call.backend, "dtype": call.dtype,
                "mode": call.mode, "status": verdict.status, "why": verdict.why, "ratio": verdict.ratio,
                "ms": round(1e3 * verdict.seconds, 1),
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
            file.flush()
            records[seed] = record
            if verdict.status in ("failed", "broken"):
                print(
                    f"{seed:>7} {call.kind}, {call.backend}, {call.dtype}: {verdict.status}: {verdict.why[:200]}",
                    flush=True,
                )
        running.unlink(missing_ok=True)
        faulthandler.disable()
    return [records[seed] for seed in seeds if seed in records]


def summary(records, log):
    """Print how many calls of each class, and on each backend, came to what; return the exit status."""
    for title, key in (("class", lambda r: r["kind"]), ("backend", lambda r: f"{r['backend']} {r['dtype']}")):
        counts, worst = defaultdict(Counter), defaultdict(float)
        for record in records:
            counts[key(record)][record["status"]] += 1
            worst[key(record)] = max(worst[key(record)], record["ratio"])
        print(
            f"\n{title:<28}{'calls':>8}"
            + "".join(f"{status:>9}" for status in STATUSES)
            + "   largest error in budgets"
        )
        for name in sorted(counts):
            row = counts[name]
            print(
                f"{name:<28}{row.total():>8}"
                + "".join(f"{row[status] or '':>9}" for status in STATUSES)
                + f"{worst[name]:>12.3g}"
            )
    total = Counter(record["status"] for record in records)
    seconds = sum(record["ms"] for record in records) / 1e3
    print(f"\n{len(records)} calls in {seconds:.0f} s: " + ", ".join(f"{total[s]} {s}" for s in STATUSES if total[s]))
    print(f"log: {log}; python -m tests.apart --seed N prints and repeats a call")
    return int(total["failed"] + total["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
