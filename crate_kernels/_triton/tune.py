"""Times the candidates of a launch table and keeps the fastest correct one.

A candidate can end the whole process: the compiler aborts, or a kernel reads out of bounds and no further call reaches
the device. So a child process does the timing and reports each candidate before it runs. If the child ends early, a
new child continues without that candidate.

Before, several processes may compile the candidates. Triton keeps what it compiled in files, so the process that times
finds it there. A candidate that ends its process while it compiles is left out of the timing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton.table import Config, LaunchRow, Table, forced

# ("ready",), then per workload ("trying", number of the configuration), ("timed", number, seconds or None), ... and
# ("found", config, seconds, seconds of the shipped one) or ("failed", reason).
Message = tuple[Any, ...]
# Takes the number of a workload, of its configuration, and the seconds: None if that fails or is wrong.
OnTiming = Callable[[int, int, float | None], object]


@dataclass(frozen=True)
class Prepared:
    """A call with its tensors drawn.

    Attributes:
        timed: makes the call.
        results: makes the call and returns the results to check, by name; names of gradients begin with d.
        plain: returns the same results, computed by plain PyTorch in a dtype.
        dtype: the dtype of the call.
    """

    timed: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    plain: Callable[[torch.dtype], dict[str, Tensor]]
    dtype: torch.dtype


@dataclass(frozen=True)
class Workload:
    """One call on which a row of a launch table is tuned.

    Attributes:
        table: the launch table.
        row: the conditions of the row to write; ``tune`` searches for its configuration.
        make: draws the tensors of the call; called once.
    """

    table: Table
    row: LaunchRow
    make: Callable[[], Prepared]

    def __str__(self) -> str:
        causal = {None: "", True: " causal", False: " full"}[self.row.causal]
        dtype = {None: "", True: " 16-bit", False: " fp32"}[self.row.half]
        return f"{self.table.name} head_dim {self.row.head_dim} seqlen {self.row.seqlen or 'longer'}{causal}{dtype}"

    def tuned(self, config: Config) -> LaunchRow:
        """Return the row to write, with the configuration found."""
        return LaunchRow(dict(config), *self.row.conditions)


@dataclass(frozen=True)
class Result:
    """The fastest configuration of a workload, its seconds, and the seconds of the shipped one unless that fails."""

    config: Config
    seconds: float
    shipped: float | None


def search(
    workload: Workload,
    shipped: Config,
    clock: Callable[[Callable[[], object]], float],
    judge: Callable[[Prepared], Callable[[], bool]],
    lost: Collection[int] = (),
    trying: Callable[[int], object] = lambda number: None,
    check_device: Callable[[], object] = lambda: None,
    timed: Callable[[int, float | None], object] = lambda number, seconds: None,
) -> Result:
    """Time ``shipped``, configuration number 0, and every candidate of a workload; a wrong result is never timed.

    Configurations in ``lost`` are left out. ``clock`` returns the seconds of a call, ``judge`` a check of its results.
    ``trying`` and ``timed`` are called before and after each configuration, with None for seconds if it fails or is
    wrong; ``check_device`` after one that failed, and it raises if the device is unusable.

    Raises:
        RuntimeError: no configuration runs and is correct.
    """
    call = workload.make()
    is_right = judge(call)
    configs = (shipped, *workload.table.candidates)
    seconds: dict[int, float] = {}
    for number, config in enumerate(configs):
        if number in lost:
            continue
        trying(number)
        with forced(workload.table, config):
            try:
                if is_right():
                    seconds[number] = clock(call.timed)
            except Exception:  # out of shared memory or registers, or a shape the compiler refuses
                check_device()
        timed(number, seconds.get(number))
    if not seconds:
        raise RuntimeError("no configuration runs and is right")
    best = min(seconds, key=lambda number: seconds[number])
    return Result(configs[best], seconds[best], seconds.get(0))


def supervise(
    count: int,
    start: Callable[[int, frozenset[int]], Iterator[Message]],
    on_timing: OnTiming = lambda *_: None,
) -> Iterator[Result | str]:
    """Yield, for each of ``count`` workloads, its result or the reason for having none; ``on_timing`` gets each timing.

    ``start`` takes the first workload and the configurations of it to leave out, and yields messages. It may end at any
    time: the configuration being tried is lost, and ``start`` is called again.

    Raises:
        RuntimeError: ``start`` ended before it was ready.
    """
    first, lost = 0, frozenset[int]()
    while first < count:
        ready, at = False, None
        for kind, *content in start(first, lost):
            ready = True
            if kind == "trying":
                (at,) = content
            elif kind == "timed":
                on_timing(first, *content)
            elif kind != "ready":
                yield Result(*content) if kind == "found" else content[0]
                first, lost, at = first + 1, frozenset(), None
        if not ready:
            raise RuntimeError("tune: the process that times ended before it began")
        if first == count:
            return
        if at is None:
            yield "the process ended as it prepared the call"
            first, lost = first + 1, frozenset()
        else:
            lost |= {at}
            on_timing(first, at, None)


def in_process(target: Callable[..., None], *args: Any) -> Iterator[Message]:
    """Call ``target(send, *args)`` in a new process and yield its messages until it ends, normally or not."""
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            try:
                message = ours.recv()
            except EOFError:
                return
            yield message
    finally:
        process.terminate()
        process.join()
        ours.close()


# Takes the numbers of a process's workloads, how many are done, and configurations of the next one to leave out.
Start = Callable[[Sequence[int], int, frozenset[int]], Iterator[Message]]


def compile_all(count: int, jobs: int, start: Start) -> dict[int, frozenset[int]]:
    """Compile ``count`` workloads in ``jobs`` processes; return the configurations that ended theirs, by workload."""
    lost: dict[int, frozenset[int]] = {}

    def share(job: int) -> None:
        mine = range(job, count, jobs)

        def on_timing(index: int, number: int, seconds: float | None) -> None:
            lost[mine[index]] = lost.get(mine[index], frozenset()) | {number}

        for _ in supervise(len(mine), partial(start, mine), on_timing):
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
        with forced(workload.table, config):
            try:
                call.timed()
            except Exception:  # refused by the compiler, or too large
                continue
