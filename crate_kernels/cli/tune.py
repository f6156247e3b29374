"""``tune``: time the launch configurations of the kernels on this GPU and keep the fastest."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels._triton import launch, tune
from crate_kernels._triton.table import LONGEST, Config, user_table, write_user_rows
from crate_kernels.bench import clock
from crate_kernels.cli import table

_ROUNDS = 20
_LIMIT = 100  # seconds per configuration; then its process ends, and it alone is lost
_STDERR = 2
_COMPILING = 0.5  # share of the minutes
_TIME_IS_UP = "time is up: run again to resume"
_INCOMPLETE = 3  # exit status
_RANKED = Path(launch.__file__).with_name("ranked")  # the configurations worth timing first, by architecture


class Log:
    """A file of JSON lines: each timing and each result as it comes. Workloads with a result are not timed again."""

    def __init__(self, path: Path | None) -> None:
        """Read what earlier runs wrote; a line that was cut off is left out."""
        self.path = path
        self.found: dict[str, Config] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "found" in entry:
                self.found[entry["workload"]] = entry["found"]

    def add(self, workload: tune.Workload, **fields: object) -> None:
        """Append a line."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"workload": str(workload), **fields}) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--op", choices=backends.OPS, action="append", help="only this operator; may be repeated")
    parser.add_argument(
        "--candidates",
        type=Path,
        help="file of configurations to time, by workload; other workloads time all of theirs. Default: the shipped "
        "ranking for this architecture, if there is one",
    )
    parser.add_argument(
        "--only", action="append", default=[], help="only workloads with this in their name; repeatable"
    )
    parser.add_argument("--every", action="store_true", help="time every configuration, ranked or not")
    parser.add_argument("--max-configs", "--most", type=int, help="configurations to time of a workload, evenly spaced")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no measurement after so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile; one times afterwards")
    parser.add_argument("--log", type=Path, help="file of all timings, from which tune resumes")
    parser.add_argument("--table", type=Path, help="file that also gets each row when it is found")
    parser.add_argument("--forget", action="store_true", help="remove earlier results, and time nothing")


def workloads(
    ops: Sequence[str], only: Sequence[str] = (), packages: Sequence[str] = ("cuda", "triton")
) -> list[tune.Workload]:
    """List the workloads of the named operators, or those with one of ``only`` in their names, in its order.

    ``packages``: of these of an operator's packages of kernels.
    """
    found = []
    for op in ops:
        for module in (f"crate_kernels.ops.{op}.{package}.tune" for package in packages):
            if backends._is_there(module):  # not every operator has some
                found += import_module(module).workloads()
    chosen = {str(one): one for part in only for one in found if part in str(one)}
    return list(chosen.values()) if only else found


def ranked(device: torch.device) -> Path | None:
    """Return the shipped file of the best configurations of a GPU's architecture, the fastest first, or None."""
    path = _RANKED / f"{launch.arch(device)}.json"
    return path if path.exists() else None


def narrowed(every: list[tune.Workload], path: Path | None, max_configs: int | None = None) -> list[tune.Workload]:
    """Return the workloads with only those candidates that a file names, and at most so many.

    Raises:
        ValueError: the file cannot be read, or is no mapping of workloads to lists of configurations.
    """
    found: dict[str, tuple[Config, ...]] = {}
    try:
        if path is not None:
            chosen = json.loads(path.read_text())
            found = {str(name): tuple(dict(config) for config in configs) for name, configs in chosen.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"--candidates must map workloads to configurations, got {path}: {error}") from error

    def few(workload: tune.Workload) -> tuple[Config, ...]:
        if str(workload) in found:
            return found[str(workload)][:max_configs]  # from the best on
        candidates = workload.table.candidates
        return candidates[:: math.ceil(len(candidates) / max_configs)] if max_configs and candidates else candidates

    return [replace(one, table=replace(one.table, candidates=few(one))) for one in every]


def run(args: argparse.Namespace) -> int:
    """Tune; print and write each result at once; return 1 if some workload could not be tuned, 3 if time was up."""
    if not torch.cuda.is_available():
        print("tune: needs a CUDA or HIP GPU, and PyTorch sees none (python -m crate_kernels info)")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    if args.forget:
        user_table(gpu).unlink(missing_ok=True)
        print(f"tune: the shipped configurations serve {gpu} again")
        return 0
    ops: list[str] = args.op or [*backends.OPS]
    reason = next((why for op in ops if (why := backends.unavailable_reason(op, "triton", device))), None)
    if reason is not None and args.op:
        print(f"tune: {reason}")
        return 1
    try:
        user_table(gpu).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # fail now rather than after minutes of timing
        print(f"tune: the user's cache cannot be written: {error}; set XDG_CACHE_HOME or HOME to a folder that can")
        return 1
    if args.candidates is None and not args.every:
        args.candidates = ranked(device)
        if args.candidates is not None:
            print(f"tune: times the best ranked of {args.candidates.name}, all where none is ranked (--every: all)")
    try:
        log = Log(args.log)
        every = narrowed(workloads(ops, args.only), args.candidates, args.max_configs)
    except (OSError, ValueError) as error:
        print(f"tune: {error}")
        return 1
    earlier = [one for one in every if str(one) in log.found]
    for workload in earlier:
        _write(args, gpu, workload, log.found[str(workload)])
    return _tune(args, gpu, ops, every, log)


def _write(args: argparse.Namespace, gpu: str, workload: tune.Workload, config: Config) -> None:
    path = write_user_rows(gpu, {workload.table.name: [workload.tuned(config)]})
    if args.table is not None:
        shutil.copyfile(path, args.table)


def _tune(args: argparse.Namespace, gpu: str, ops: list[str], every: list[tune.Workload], log: Log) -> int:
    """Compile and time the workloads that have no result yet."""
    numbers = [number for number, one in enumerate(every) if str(one) not in log.found]
    now = time.monotonic()
    compiling = 60 * _COMPILING * args.minutes
    work = _Work(ops, args.only, args.candidates, args.max_configs, now + 60 * args.minutes, now + compiling)
    lost: dict[int, frozenset[int]] = {}
    if args.jobs > 1 and numbers:
        lost = tune.compile_all(len(numbers), args.jobs, partial(_compiled, work, numbers))
        print(f"tune: compiled in {time.monotonic() - now:.0f} s", flush=True)

    def start(first: int, more: frozenset[int]) -> Iterator[tune.Message]:
        return tune.in_process(_time, work, numbers, lost, first, more)

    def on_timing(index: int, number: int, seconds: float | None) -> None:
        workload = every[numbers[index]]
        configs = ("shipped", *map(dict, workload.table.candidates))
        log.add(workload, config=configs[number], seconds=seconds)

    lines, failed, left = [], 0, 0
    try:
        for number, result in zip(numbers, tune.supervise(len(numbers), start, on_timing), strict=True):
            workload = every[number]
            if isinstance(result, str):
                left += result == _TIME_IS_UP
                failed += result != _TIME_IS_UP
                print(f"{workload}: left as shipped: {result}", flush=True)
                continue
            log.add(workload, found=dict(result.config), seconds=result.seconds, shipped=result.shipped)
            _write(args, gpu, workload, result.config)
            shipped = "fails" if result.shipped is None else f"{result.shipped * 1e6:.0f} us"
            print(f"{workload}: {result.seconds * 1e6:.0f} us, as shipped {shipped}", flush=True)
            ratio = "" if result.shipped is None else f"{result.shipped / result.seconds:.2f}"
            lines.append([str(workload), ratio, str(dict(result.config))])
    except KeyboardInterrupt:
        print("tune: interrupted; what follows is written and serves")
    print("\n" + table.render(["workload", "times faster", "configuration"], lines))
    print(f"\ntune: written to {user_table(gpu)}")
    return _INCOMPLETE if left else int(failed > 0)


@dataclass(frozen=True)
class _Work:
    """What a process needs to make the workloads again; times are of ``time.monotonic``, which processes share."""

    ops: list[str]
    only: list[str]
    candidates: Path | None
    max_configs: int | None
    stop_at: float
    compile_until: float

    def workloads(self, numbers: Sequence[int]) -> list[tune.Workload]:
        """Return the workloads of these numbers."""
        every = narrowed(workloads(self.ops, self.only), self.candidates, self.max_configs)
        return [every[number] for number in numbers]


def _compiled(
    work: _Work, numbers: Sequence[int], mine: Sequence[int], first: int, lost: frozenset[int]
) -> Iterator[tune.Message]:
    """Start a process that compiles its share ``mine`` of the workloads."""
    return tune.in_process(_compile, work, [numbers[index] for index in mine], first, lost)


def _compile(connection: Connection, work: _Work, mine: list[int], first: int, lost: frozenset[int]) -> None:
    """Compile the workloads from ``first`` on; leave out configurations ``lost`` of the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    device = torch.device("cuda", torch.cuda.current_device())
    connection.send(("ready",))
    for workload in work.workloads(mine)[first:]:
        if time.monotonic() < work.compile_until:

            def send(message: tune.Message) -> None:
                faulthandler.dump_traceback_later(_LIMIT, exit=True, file=_STDERR)
                connection.send(message)

            with contextlib.suppress(Exception):  # the process that times says why
                tune.make_each(workload, _shipped(workload, device), send, lost)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        faulthandler.cancel_dump_traceback_later()
        connection.send(("failed", "compiled"))
        lost = frozenset()


def _time(
    connection: Connection,
    work: _Work,
    numbers: list[int],
    known: dict[int, frozenset[int]],
    first: int,
    lost: frozenset[int],
) -> None:
    """Time the workloads from ``first`` on and send the results; leave out configurations ``lost`` of the first.

    ``known`` has, by place in ``numbers``, configurations that ended the process that compiled them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    device = torch.device("cuda", torch.cuda.current_device())
    connection.send(("ready",))

    def trying(number: int) -> None:
        faulthandler.dump_traceback_later(_LIMIT, exit=True, file=_STDERR)
        connection.send(("trying", number))

    for index, workload in enumerate(work.workloads(numbers)[first:], first):
        if time.monotonic() > work.stop_at:
            connection.send(("failed", _TIME_IS_UP))
            continue
        try:
            result = tune.search(
                workload,
                _shipped(workload, device),
                partial(_seconds, device),
                judge,
                lost | known.get(index, frozenset()),
                trying,
                torch.cuda.synchronize,
                lambda number, seconds: connection.send(("timed", number, seconds)),
            )
            connection.send(("found", dict(result.config), result.seconds, result.shipped))
        except Exception as error:
            torch.cuda.synchronize()  # raises, and so ends this process, if the device is unusable
            connection.send(("failed", f"{type(error).__name__}: {error}"))
        faulthandler.cancel_dump_traceback_later()
        lost = frozenset()


def judge(call: tune.Prepared) -> Callable[[], bool]:
    """Return a check of a call by the error tolerance of the tests."""
    eager, exact = call.plain(call.dtype), call.plain(torch.float64)
    return lambda: all(m.passed for m in testing.measure(call.results(), eager, exact, call.dtype))


def _shipped(workload: tune.Workload, device: torch.device) -> Config:
    row = workload.row
    dtype = torch.float32 if row.half is False else torch.bfloat16
    return workload.table.shipped(device, row.head_dim or 64, row.seqlen or LONGEST, bool(row.causal), dtype)


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the median device time of a call, with cold caches."""
    return statistics.median(clock.device_seconds(call, tuple, device, _ROUNDS) or [])
