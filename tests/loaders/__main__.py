"""Load thousands of mutated folders, log each, and say what came of them; or repeat the one of a seed."""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

import crate_kernels
from crate_kernels._core import files
from tests.loaders import folders
from tests.loaders.judge import judge
from tests.tools import bound

OUTPUT = Path("build/fuzz-loaders")


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.loaders", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat the folder of one seed, and leave it in ./build")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds to go through (default %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--log", type=Path, help=f"log of the seeds (default {OUTPUT}/<hash of the sources>.jsonl)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if arguments.seed is not None:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        verdict = judge(arguments.seed, folders.write(Path(tempfile.mkdtemp(dir=OUTPUT))), OUTPUT)
        print(f"seed {arguments.seed}: {verdict.status}: {verdict.why}\n{OUTPUT / 'drawn'}")
        return int(verdict.status == "failed")
    log = arguments.log or OUTPUT / f"{digest()}.jsonl"
    seeds = range(arguments.start, arguments.start + arguments.count)
    if arguments.child:
        return run(seeds, log)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.owned(log):
            while subprocess.run(bound.command("-m", "tests.loaders", *sys.argv[1:], "--child")).returncode:
                crashed = next(seed for seed in seeds if seed not in done(log))
                record(log, crashed, "failed", "the process ended in it")
    except files.InUse as error:
        print(error)
        return 1
    return summary([found for seed, found in done(log).items() if seed in seeds], log)


def digest():
    """Return a name for the sources that are tested and that test: a log holds for no others."""
    found = hashlib.sha256()
    for folder in (Path(crate_kernels.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def done(log):
    """Return the records of a log by their seeds."""
    lines = log.read_text().splitlines() if log.exists() else ()
    return {found["seed"]: found for found in map(json.loads, lines)}


def record(log, seed, status, why):
    """Append a record to a log."""
    with log.open("a") as file:
        file.write(json.dumps({"seed": seed, "status": status, "why": why}) + "\n")


def run(seeds, log):
    """Load the folders that the log does not have yet."""
    known, last = done(log), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "sound").mkdir()
        sound = folders.write(Path(scratch) / "sound")
        for seed in seeds:
            if seed in known:
                continue
            verdict = judge(seed, sound, Path(scratch))
            record(log, seed, *verdict)
            if verdict.status == "failed":
                print(f"{seed:>7} {verdict.why}", flush=True)
            if time.monotonic() - last > 30:
                last = time.monotonic()
                print(f"{seed:>7} ...", flush=True)
    return 0


def summary(records, log):
    """Print what came of the folders, by the mutation; return the exit status."""
    total = Counter(found["status"] for found in records)
    print(f"{len(records)} folders: " + ", ".join(f"{count} {status}" for status, count in total.items()))
    print(f"log: {log}; python -m tests.loaders --seed N repeats a folder")
    return int(total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
