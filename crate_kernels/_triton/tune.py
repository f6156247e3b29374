"""Time the candidates of a launch table and keep the fastest that is right.

Compiling or running a candidate can end more than itself: the compiler aborts, or a kernel reads where nothing is, and
its process gets no further call through to the device. So the timing is done in a process of its own, which says what
it is at; when it ends early, the next one goes on without that candidate.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton import launch
from crate_kernels._triton.launch import Config, Row, Table

# ("ready",), then for each workload ("trying", number of the configuration), ... and ("found", config, seconds,
# seconds as shipped) or ("failed", why).
Message = tuple[Any, ...]


@dataclass(frozen=True)
class Prepared:
    """A call whose tensors are drawn.

    Attributes:
        timed: makes the call.
        results: makes it and returns what is judged, by name; the names of gradients begin with d.
        plain: returns the same results of plain PyTorch, computed in a dtype.
        dtype: the dtype of the call.
    """

    timed: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    plain: Callable[[torch.dtype], dict[str, Tensor]]
    dtype: torch.dtype


@dataclass(frozen=True)
class Workload:
    """One call that a row of a launch table is tuned on.

    Attributes:
        table: the launch table.
        row: the conditions of the row to write; its configuration is what is looked for.
        make: draws the tensors of the call; called once.
    """

    table: Table
    row: Row
    make: Callable[[], Prepared]

    def __str__(self) -> str:
        causal = {None: "", True: " causal", False: " full"}[self.row.causal]
        dtype = {None: "", True: " 16-bit", False: " fp32"}[self.row.half]
        return f"{self.table.name} head_dim {self.row.head_dim} seqlen {self.row.seqlen or 'longer'}{causal}{dtype}"

    def tuned(self, config: Config) -> Row:
        """Return the row to write."""
        return Row(dict(config), *self.row.conditions)


@dataclass(frozen=True)
class Result:
    """The fastest configuration of a workload, its time and, unless that one fails, the shipped one's, in seconds."""

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
) -> Result:
    """Time the shipped configuration and every candidate of a workload; a wrong result is never timed.

    Args:
        workload: what to time.
        shipped: the configuration numbered 0; the candidates follow.
        clock: returns the seconds of a call.
        judge: returns the check of a call: whether its results are right.
        lost: numbers of configurations to leave out.
        trying: told the number of each configuration before it runs.
        check_device: called after a configuration failed; raises where nothing can run any more.

    Raises:
        RuntimeError: no configuration runs and is right.
    """
    call = workload.make()
    is_right = judge(call)
    configs = (shipped, *workload.table.candidates)
    seconds: dict[int, float] = {}
    for number, config in enumerate(configs):
        if number in lost:
            continue
        trying(number)
        with launch.forced(workload.table, config):
            try:
                if is_right():
                    seconds[number] = clock(call.timed)
            except Exception:  # out of shared memory or registers, or a shape the compiler refuses
                check_device()
    if not seconds:
        raise RuntimeError("no configuration runs and is right")
    best = min(seconds, key=lambda number: seconds[number])
    return Result(configs[best], seconds[best], seconds.get(0))


def supervise(count: int, start: Callable[[int, frozenset[int]], Iterator[Message]]) -> Iterator[Result | str]:
    """Yield, for each of ``count`` workloads, its result or why there is none.

    Args:
        count: number of workloads.
        start: goes through the workloads from the first one given, of which it leaves some configurations out, and
            yields messages. It may end at any time: what it was at is lost, and it is started again.

    Raises:
        RuntimeError: it ended before it was ready.
    """
    first, lost = 0, frozenset[int]()
    while first < count:
        ready, at = False, None
        for kind, *content in start(first, lost):
            ready = True
            if kind == "trying":
                (at,) = content
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


def in_process(target: Callable[..., None], *args: Any) -> Iterator[Message]:
    """Call ``target(send, *args)`` in a process of its own and yield what it sends, until it ends in whatever way."""
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
