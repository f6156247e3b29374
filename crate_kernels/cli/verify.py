"""``verify``: every available backend against float64 on named cases."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels.bench.rows import DTYPES
from crate_kernels.cli import table
from crate_kernels.experiments.common import machine


@dataclass(frozen=True)
class VerifyRow:
    """The worst output of one case on one backend: the largest share of its error tolerance."""

    case: str
    backend: str
    dtype: str
    output: str
    error: float
    relative_to_eager: float | None
    tolerance: float
    passed: bool
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--op", action="append", choices=sorted({c.op for c in testing.CASES}), help="only this one")
    parser.add_argument("--backend", action="append", help="only this one; by default all that are available")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="only this one")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if anything failed, 2 if nothing could be checked."""
    found = machine.choose_or_say("verify", args.device)
    if found is None:
        return 2
    device = str(found)
    for name in args.backend or ():
        if name not in backends.names():
            print(f"verify: --backend must be one of {', '.join(backends.names())}, got {name!r}")
            return 2
    rows: list[VerifyRow] = []
    excluded: Counter[str] = Counter()
    for dtype in args.dtype or DTYPES:
        for case in testing.CASES:
            if args.op is None or case.op in args.op:
                rows += _check(case, dtype, device, args.backend, excluded)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(
            table.render(["case", "backend", "dtype", "output", "error", "x eager", "tolerance", "pass"], _cells(rows))
        )
        for reason, count in excluded.items():
            print(f"excluded, {count} cases: {reason}")
        for row in rows:
            if row.note:
                print(f"{row.case} on {row.backend}, {row.dtype}: {row.note}")
        failed = sum(not row.passed for row in rows)
        print(f"\n{len(rows) - failed} passed, {failed} failed, on {device}")
    if not rows:
        print("verify: no backend was asked for that is available; see `python -m crate_kernels info`")
        return 2
    return int(not all(row.passed for row in rows))


def _backends(case: testing.Case, dtype: torch.dtype, device: str, only: list[str] | None) -> Iterator[str]:
    """Yield the backends that can run ``case``, without ``reference``: the others are compared with it."""
    for name in only or backends.names():
        if name == "reference":
            continue
        try:
            yield backends.resolve(testing.SPECS[case.op].package, name, torch.device(device), dtype)
        except (RuntimeError, NotImplementedError):
            continue  # unavailable, or not on this device or in this dtype


def _check(
    case: testing.Case, dtype_name: str, device: str, only: list[str] | None, excluded: Counter[str]
) -> Iterator[VerifyRow]:
    """Yield a row for each backend that can run ``case`` in that dtype."""
    dtype = DTYPES[dtype_name]
    inputs = eager = oracle = None
    for backend in _backends(case, dtype, device, only):
        reason = testing.excluded(case, backend, dtype)
        if reason is not None:
            excluded[reason] += 1
            continue
        if inputs is None or eager is None or oracle is None:
            inputs = testing.make_inputs(case, dtype, device)
            eager = testing.run(case, inputs, "reference")
            oracle = testing.run(case, inputs.to(torch.float64), "reference")
        try:
            results = testing.measure(testing.run(case, inputs, backend), eager, oracle, dtype)
        except NotImplementedError as refusal:
            excluded[str(refusal)] += 1
            continue
        except Exception as error:  # a crashed kernel is a failed row; the others still run
            yield VerifyRow(str(case), backend, dtype_name, "", float("nan"), None, 0.0, False, repr(error))
            continue
        worst = max(results, key=lambda r: (not r.passed, r.share))
        ratio = worst.error / worst.eager_error if worst.eager_error else None
        note = "" if worst.finite else f"{worst.output} is not finite where float64 is"
        yield VerifyRow(
            str(case), backend, dtype_name, worst.output, worst.error, ratio, worst.tolerance, worst.passed, note
        )


def _cells(rows: list[VerifyRow]) -> list[list[str]]:
    cells = []
    for row in rows:
        ratio = "-" if row.relative_to_eager is None else f"{row.relative_to_eager:.2f}"
        numbers = [f"{row.error:.1e}", ratio, f"{row.tolerance:.1e}"]
        cells.append([row.case, row.backend, row.dtype, row.output, *numbers, "yes" if row.passed else "NO"])
    return cells
