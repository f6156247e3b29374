"""``tune``: time the launch configurations of the Triton kernels on this GPU and keep the fastest."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels._triton import launch, tune
from crate_kernels.bench import clock
from crate_kernels.cli import table

_ROUNDS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--op", choices=backends.OPS, action="append", help="only this operator; may be repeated")
    parser.add_argument(
        "--candidates",
        type=Path,
        help="a file of the configurations to time, by workload; the others time all of theirs",
    )
    parser.add_argument("--forget", action="store_true", help="remove what was found earlier, and time nothing")


def workloads(ops: list[str]) -> list[tune.Workload]:
    """List the workloads of the named operators; not every operator has some."""
    found = []
    for op in ops:
        if backends._is_there(f"crate_kernels.ops.{op}.triton.tune"):
            found += import_module(f"crate_kernels.ops.{op}.triton.tune").workloads()
    return found


def narrowed(every: list[tune.Workload], path: Path | None) -> list[tune.Workload]:
    """Return the workloads with only those candidates that a file names; without a file, as they are.

    Raises:
        ValueError: the file cannot be read, or is no mapping of workloads to lists of configurations.
    """
    if path is None:
        return every
    try:
        chosen = json.loads(path.read_text())
        found = {str(name): tuple(dict(config) for config in configs) for name, configs in chosen.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--candidates must map workloads to configurations, got {path}: {error}") from error
    return [
        replace(one, table=replace(one.table, candidates=found[str(one)])) if str(one) in found else one
        for one in every
    ]


def run(args: argparse.Namespace) -> int:
    """Tune; print and write each result at once; return 1 if some workload could not be tuned."""
    if not torch.cuda.is_available():
        print("tune: needs a CUDA or HIP GPU, and PyTorch sees none (python -m crate_kernels info)")
        return 1
    gpu = torch.cuda.get_device_name(torch.cuda.current_device())
    if args.forget:
        launch.user_table(gpu).unlink(missing_ok=True)
        print(f"tune: the shipped configurations serve {gpu} again")
        return 0
    ops: list[str] = args.op or [*backends.OPS]
    reason = next((why for op in ops if (why := backends.unavailable_reason(op, "triton"))), None)
    if reason is not None and args.op:
        print(f"tune: {reason}")
        return 1
    try:
        launch.user_table(gpu).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # fail now rather than after minutes of timing
        print(f"tune: the user's cache cannot be written: {error}; set HOME to a folder that can")
        return 1
    lines, failed = [], 0
    try:
        every = narrowed(workloads(ops), args.candidates)
    except ValueError as error:
        print(f"tune: {error}")
        return 1
    results = tune.supervise(len(every), partial(tune.in_process, partial(_work, args.candidates), ops))
    try:
        for workload, result in zip(every, results, strict=True):
            if isinstance(result, str):
                failed += 1
                print(f"{workload}: left as shipped: {result}", flush=True)
                continue
            launch.write_user_rows(gpu, {workload.table.name: [workload.tuned(result.config)]})
            shipped = "fails" if result.shipped is None else f"{result.shipped * 1e6:.0f} us"
            print(f"{workload}: {result.seconds * 1e6:.0f} us, as shipped {shipped}", flush=True)
            ratio = "" if result.shipped is None else f"{result.shipped / result.seconds:.2f}"
            lines.append([str(workload), ratio, str(dict(result.config))])
    except KeyboardInterrupt:
        print("tune: interrupted; what follows is written and serves")
    print("\n" + table.render(["workload", "times faster", "configuration"], lines))
    print(f"\ntune: written to {launch.user_table(gpu)}")
    return int(failed > 0)


def _work(path: Path | None, connection: Connection, ops: list[str], first: int, lost: frozenset[int]) -> None:
    """Time the workloads from ``first`` on and send the results; leave out configurations ``lost`` of the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    device = torch.device("cuda", torch.cuda.current_device())
    every = narrowed(workloads(ops), path)[first:]
    connection.send(("ready",))
    for workload in every:
        try:
            result = tune.search(
                workload,
                _shipped(workload, device),
                partial(_seconds, device),
                judge,
                lost,
                lambda number: connection.send(("trying", number)),
                torch.cuda.synchronize,
            )
            connection.send(("found", dict(result.config), result.seconds, result.shipped))
        except Exception as error:
            torch.cuda.synchronize()  # raises, and so ends this process, if the device is unusable
            connection.send(("failed", f"{type(error).__name__}: {error}"))
        lost = frozenset()


def judge(call: tune.Prepared) -> Callable[[], bool]:
    """Return a check of a call by the error budget of the tests."""
    eager, exact = call.plain(call.dtype), call.plain(torch.float64)
    return lambda: all(m.passed for m in testing.measure(call.results(), eager, exact, call.dtype))


def _shipped(workload: tune.Workload, device: torch.device) -> launch.Config:
    row = workload.row
    dtype = torch.float32 if row.half is False else torch.bfloat16
    return workload.table.shipped(device, row.head_dim or 64, row.seqlen or launch.LONGEST, bool(row.causal), dtype)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the median device time of a call, with cold caches."""
    return statistics.median(clock.device_seconds(call, tuple, device, _ROUNDS) or [])
