"""``bench``: our backends against PyTorch's own on this machine, and changes between two runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from crate_kernels import testing
from crate_kernels._core import files
from crate_kernels.bench import clock, load, measuring, providers, rows
from crate_kernels.bench.rows import BenchRow, Results
from crate_kernels.cli import table
from crate_kernels.experiments.common import machine

_QUICK = ("eager", "sdpa", *providers.OURS)
_QUICK_CASES = ("vit-197-d64", "lm-1024-d64-causal", "vit-196-many", "vit-196", "lm-1024-causal", "tokens-1576")
_RESAMPLES = 2000
_SECONDS = {"quick": 0.3, "brief": 0.5, "full": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a table in under a minute: fp32, no torch.compile")
    size.add_argument("--full", action="store_true", help="every case that has a size for this device")
    parser.add_argument("--op", choices=list(testing.SPECS), action="append")
    parser.add_argument("--backend", choices=providers.OURS, action="append", help="all of them by default")
    parser.add_argument("--dtype", choices=list(rows.DTYPES), action="append", help="fp32 and bf16 by default")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--output", type=Path, help="JSON file to write, which plot and compare read")
    subcommands = parser.add_subparsers(dest="bench_subcommand", metavar="compare")
    compare = subcommands.add_parser("compare", help="what moved between two files of results beyond their noise")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument(
        "--min-change",
        "--least",
        type=float,
        default=0.05,
        help="a change counts if its 95%% interval is wholly further than this from none (default 0.05); the interval "
        "is of the samples of both runs, so a machine that is slower all day is seen as a change",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if one of our backends is wrong, 2 if nothing could be measured."""
    if args.bench_subcommand == "compare":
        return _compare(args)
    device = machine.choose_or_say("bench", args.device)
    if device is None:
        return 2
    if args.output is None:
        return _bench(args, device)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with files.owned(args.output):
            return _bench(args, device)
    except OSError as error:  # another run has the file, or the disk is full
        print(f"bench: {error}")
        return 2


def _bench(args: argparse.Namespace, device: torch.device) -> int:
    """Time, print and write; return the exit status."""
    tier = "quick" if args.quick else "full" if args.full else "brief"
    dtypes = args.dtype or (["fp32"] if args.quick else ["fp32", "bf16"])
    looks = [load.measure()] if device.type == "cpu" else []
    for found in looks:
        load.limit_threads(found, lambda text: print(f"bench: {text}"))
    results = Results(rows.machine(device, dtypes), [])
    print(_heading(results))
    try:
        for row in _rows(tier, args.op, args.backend or providers.OURS, dtypes, device):
            results.rows.append(row)
            if args.output is not None:
                rows.write(args.output, results)  # at once: a run that is killed leaves what it timed
            if row.times or not row.skipped.startswith(("Triton's", "PyTorch has", "flash-attn", "FlexA")):
                print(f"{row.key:58} {_time_cell(row)}", flush=True)
    except KeyboardInterrupt:
        print("bench: interrupted; what follows is what was timed")
    looks += [load.measure() for _ in looks]
    if any(found.busy for found in looks):
        results.machine["load"] = f"{looks[0]} before, {looks[1]} after"
    if args.output is not None:
        rows.write(args.output, results)
    print("\n" + _table(results))
    if "load" in results.machine:
        print(f"\nbench: {_load_warning(results)}")
    wrong = [row for row in results.rows if _is_wrong(row) and row.provider in providers.OURS]
    for row in wrong:
        print(f"bench: {row.key} is {row.skipped}")
    return int(bool(wrong))


def _rows(
    tier: str, ops: list[str] | None, ours: Sequence[str], dtypes: list[str], device: torch.device
) -> Iterator[BenchRow]:
    """Yield the timed rows of a tier one by one."""

    def timer(call: clock.Call, prepare: clock.Prepare) -> list[float]:
        return clock.host_seconds(call, prepare, device, _SECONDS[tier])

    for timed in testing.TIMED_CASES:
        if device.type not in timed.devices or (ops and timed.case.op not in ops):
            continue
        if not {"quick": timed.case.name in _QUICK_CASES, "brief": timed.brief, "full": True}[tier]:
            continue
        for dtype in dtypes:
            for direction in ("forward", "both"):
                for provider in providers.of(timed.case.op):
                    if provider.name in (providers.DEFAULT, *providers.OURS) and provider.name not in ours:
                        continue  # the table names the backend that it times, hence no default
                    if tier != "quick" or provider.name in _QUICK:
                        package = testing.SPECS[timed.case.op].package  # the name that figures ask for
                        row = measuring.blank(package, timed, dtype, direction, provider.name)
                        yield measuring.measure(row, timed, provider, device, timer)


def _heading(results: Results) -> str:
    facts = results.machine
    product = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in facts["product_flops"].items())
    return (
        f"{facts['device']} ({facts['processor']}), torch {facts['torch']}; "
        f"product {product}; copy {facts['copy_bytes'] / 1e9:.3g} GB/s\n"
    )


def _time_cell(row: BenchRow) -> str:
    if not row.times:
        return row.skipped
    return (
        f"{1e3 * row.time:10.3f} ms  error {row.times_eager or 0:.2f} x eager's, {row.share or 0:.2f} of its tolerance"
    )


def _load_warning(results: Results) -> str:
    return f"others were at work ({results.machine['load']}): these times and ratios cannot be trusted"


def _table(results: Results) -> str:
    """Return a table, one line per case: the default backend's time, and the time ratios of the others.

    On a GPU, ``ms`` is the device's time. A call in a loop from Python takes the host's, where that is longer.
    A provider beyond its error tolerance is shown as "wrong", without a time.
    """
    groups = list(dict.fromkeys(row.group for row in results.rows))
    shown = dict.fromkeys(row.provider for row in results.rows if row.times or _is_wrong(row))
    others = [name for name in shown if name not in providers.OURS[1:]]
    lines = []
    for group in groups:
        beside = {row.provider: row for row in results.rows if row.group == group}
        ours = results.best(next(iter(beside.values())))
        backend, *ms = ("-", "-", "-") if ours is None else (ours.provider, *map(_ms, (ours.time, ours.on("loop"))))
        wrong = [name for name in providers.OURS if name in beside and _is_wrong(beside[name])]
        if wrong:
            backend += f" ({', '.join(wrong)} wrong)"
        ratios = [_ratio_cell(beside.get(name), ours) for name in others]
        if ours is not None or wrong:
            lines.append([" ".join(group[2:]), backend, *ms, *ratios])
    return table.render(["case", "backend", "ms", "in a loop", *(f"x {name}" for name in others)], lines)


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.3f}"


def _is_wrong(row: BenchRow) -> bool:
    return row.skipped.startswith("wrong")


def _ratio_cell(other: BenchRow | None, ours: BenchRow | None) -> str:
    if other is not None and _is_wrong(other):
        return "wrong"
    return f"{other.time / ours.time:.2f}" if other is not None and other.times and ours is not None else "-"


def _compare(args: argparse.Namespace) -> int:
    """Print the rows whose times changed, slower ones first; return 2 if a file cannot be used."""
    try:
        first, second = rows.read(args.first), rows.read(args.second)
    except (OSError, ValueError) as error:
        print(f"bench compare: {error}")
        return 2
    every = list(changes(first, second))
    moved = sorted((c for c in every if c.moved(args.min_change)), key=lambda c: -c.ratio)
    for name, results in (("first", first), ("second", second)):
        print(f"{name}: {results.machine['device']}, torch {results.machine['torch']}, {results.machine.get('git')}")
        if "load" in results.machine:
            print(f"  {_load_warning(results)}")
    if moved:
        lines = [[c.key, f"{c.ratio:.3f}", f"{c.low:.3f} to {c.high:.3f}"] for c in moved]
        print("\n" + table.render(["row", "times as long", "95%"], lines))
    print(f"\n{len(moved)} of {len(every)} rows moved by more than {100 * args.min_change:.0f}%")
    for name, keys in zip(("first", "second"), missing(first, second), strict=True):
        if keys:
            print(f"{len(keys)} rows only in the {name}, {keys[0]} for one")
    return 0


@dataclass(frozen=True)
class Change:
    """The ratio of a row's time in the second file to its time in the first.

    Attributes:
        key: the row.
        ratio: ratio of the medians.
        low, high: 95% confidence interval of the ratio, by bootstrap over the samples of both files.
    """

    key: str
    ratio: float
    low: float
    high: float

    def moved(self, min_change: float) -> bool:
        """Return whether the whole interval is further than ``min_change`` from no change."""
        return self.low > 1 + min_change or self.high < 1 / (1 + min_change)


def changes(first: Results, second: Results) -> Iterator[Change]:
    """Yield the change of every row with times in both files."""
    earlier = {row.key: row for row in first.rows if row.times}
    draws = np.random.default_rng(0)
    for row in second.rows:
        if row.times and row.key in earlier:
            a, b = np.array(earlier[row.key].times), np.array(row.times)
            medians = [np.median(draws.choice(t, (_RESAMPLES, len(t))), axis=1) for t in (a, b)]
            low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
            yield Change(row.key, float(np.median(b) / np.median(a)), float(low), float(high))


def missing(first: Results, second: Results) -> tuple[list[str], list[str]]:
    """List the rows with times in the first file only, and in the second file only."""
    a, b = ({row.key for row in results.rows if row.times} for results in (first, second))
    return sorted(a - b), sorted(b - a)
