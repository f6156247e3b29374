"""Time the candidates of a launch table and keep the fastest that is right."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from crate_kernels import _launch
from crate_kernels._launch import Config, Row, Table


@dataclass(frozen=True)
class Workload:
    """One call that a row of a launch table is tuned on.

    Attributes:
        table: the launch table.
        row: the conditions of the row to write; its configuration is what is looked for.
        make: prepares (what to time, whether its result is right); called once.
    """

    table: Table
    row: Row
    make: Callable[[], tuple[Callable[[], object], Callable[[], bool]]]

    def __str__(self) -> str:
        causal = {None: "", True: " causal", False: " full"}[self.row.causal]
        dtype = {None: "", True: " 16-bit", False: " fp32"}[self.row.half]
        return f"{self.table.name} head_dim {self.row.head_dim} seqlen {self.row.seqlen or 'longer'}{causal}{dtype}"


@dataclass(frozen=True)
class Result:
    """What one workload came to: the fastest configuration, its time and that of the shipped one, in seconds."""

    workload: Workload
    config: Config
    seconds: float
    shipped: float


def device_seconds(call: Callable[[], object], rounds: int = 20) -> float:
    """Return the median time of ``call`` on the current GPU, by events, after the caches have warmed up."""
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def search(workload: Workload, shipped: Config, clock: Callable[[Callable[[], object]], float]) -> Result:
    """Time the shipped configuration and every candidate of a workload; a wrong result is never timed.

    Raises:
        RuntimeError: the shipped configuration itself is wrong or does not run.
    """
    call, is_right = workload.make()
    best: tuple[float, Config] | None = None
    shipped_seconds = 0.0
    for config in (shipped, *workload.table.candidates):
        with _launch.forced(workload.table, config):
            try:
                right = is_right()
                seconds = clock(call) if right else 0.0
            except Exception as error:  # out of shared memory or registers, or a shape the compiler refuses
                if config is shipped:
                    raise RuntimeError(f"tune: the shipped configuration of {workload} does not run") from error
                continue
        if not right:
            if config is shipped:
                raise RuntimeError(f"tune: the shipped configuration of {workload} gives a wrong result")
            continue
        if config is shipped:
            shipped_seconds = seconds
        if best is None or seconds < best[0]:
            best = seconds, config
    assert best is not None
    return Result(workload, best[1], best[0], shipped_seconds)


def rows(results: Iterable[Result]) -> dict[str, list[Row]]:
    """Return the rows of every table in the order in which the first that fits is the right one."""
    found: dict[str, list[Row]] = {}
    for result in results:
        row = result.workload.row
        own = Row(dict(result.config), row.head_dim, row.seqlen, row.causal, row.half)
        found.setdefault(result.workload.table.name, []).append(own)
    for own in found.values():
        own.sort(key=lambda row: (row.head_dim or float("inf"), row.seqlen or float("inf")))
    return found
