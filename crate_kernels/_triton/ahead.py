"""Compiles the candidates of workloads in several processes, before ``tune`` times them in one.

Triton keeps what it compiled in files, so the process that times finds it there. A candidate that ends its process
while it compiles is left out of the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from crate_kernels._triton import launch, tune
from crate_kernels._triton.launch import Config
from crate_kernels._triton.tune import Message, Workload

# Takes the numbers of a process's workloads, how many are done, and configurations of the next one to leave out.
Start = Callable[[Sequence[int], int, frozenset[int]], Iterator[Message]]


def compile_all(count: int, jobs: int, start: Start) -> dict[int, frozenset[int]]:
    """Compile ``count`` workloads in ``jobs`` processes; return the configurations that ended theirs, by workload."""
    lost: dict[int, frozenset[int]] = {}

    def share(job: int) -> None:
        mine = range(job, count, jobs)

        def told(index: int, number: int, seconds: float | None) -> None:
            lost[mine[index]] = lost.get(mine[index], frozenset()) | {number}

        for _ in tune.supervise(len(mine), partial(start, mine), told):
            pass

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(share, range(min(jobs, count))))
    return lost


def make_each(workload: Workload, shipped: Config, send: Callable[[Message], object], lost: frozenset[int]) -> None:
    """Make a workload's call once with each configuration; the one that times finds out which of them are right."""
    call = workload.make()
    for number, config in enumerate((shipped, *workload.table.candidates)):
        if number in lost:
            continue
        send(("trying", number))
        with launch.forced(workload.table, config):
            try:
                call.timed()
            except Exception:  # refused by the compiler, or too large
                continue
