"""Measures a row: the gate, then the times, then the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crate_kernels._core.spec import Function, Provider
from crate_kernels.bench import clock, memory
from crate_kernels.bench.gate import Verdict, gate, upstream
from crate_kernels.bench.rows import DTYPES, BenchRow
from crate_kernels.testing import SPECS, Timed

DIRECTIONS = ("forward", "backward", "both")
# Takes a call and the function that prepares its arguments; returns the seconds of single calls.
Timer = Callable[[clock.Call, clock.Prepare], list[float]]


def blank(bench: str, timed: Timed, dtype: str, direction: str, provider: str, sweep: str = "") -> BenchRow:
    """Return the row of a case, without results."""
    case = timed.case
    options = dict(case.options)
    row = BenchRow(bench, case.op, case.name, dtype, direction, provider, timed.layer, list(case.shape), options, sweep)
    work = SPECS[case.op].work(case)
    row.flops = None if work.flops is None else _in_direction(direction, work.flops)
    row.bytes = DTYPES[dtype].itemsize * _in_direction(direction, work.elements)
    return row


def _in_direction(direction: str, amounts: tuple[float, float]) -> float:
    forward, backward = amounts
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def measure(row: BenchRow, timed: Timed, provider: Provider, device: torch.device, timer: Timer) -> BenchRow:
    """Fill in ``row``: errors, times and memory, or the reason for having no time."""
    dtype = DTYPES[row.dtype]
    reason = provider.unavailable_reason(timed.case, dtype, device)
    if row.direction != "forward" and device.type in provider.inference_only:
        reason = f"{provider.name} has no backward pass on this device"
    if reason is not None:
        row.skipped = reason
        return row

    def check_and_time() -> None:
        exact, function = gate(timed.case, dtype, device), provider.make(timed.case)
        verdict = exact.check(function, row.direction != "forward")
        record_verdict(row, verdict)
        if verdict.passed:
            record_times(row, *timed_call(function, exact.args, row.direction), device, timer)

    return within_memory(row, device, check_and_time)


def within_memory(row: BenchRow, device: torch.device, work: Callable[[], None]) -> BenchRow:
    """Do the work that fills in ``row``; running out of memory becomes the row's reason for having no time."""
    try:
        with memory.limited(device):
            work()
    except (RuntimeError, MemoryError) as error:
        if not memory.is_exhaustion(error):
            raise
        row.skipped = "out of memory"
        row.seconds, row.loop_seconds, row.device_seconds = [], [], []
    return row


def record_verdict(row: BenchRow, verdict: Verdict) -> None:
    """Copy the result of the gate into ``row``."""
    row.error, row.times_eager, row.share = verdict.error, verdict.times_eager, verdict.share
    if not verdict.passed:
        row.skipped = f"wrong: {verdict.output} has {verdict.share:.1f} times the error it may have against float64"


def record_times(
    row: BenchRow, call: clock.Call, prepare: clock.Prepare, device: torch.device, timer: Timer, watch: bool = True
) -> None:
    """Time a call that passed the gate, by every clock; measure its memory if ``watch``."""
    row.seconds = timer(call, prepare)
    row.loop_seconds = clock.loop_seconds(call, prepare, device, row.seconds)
    row.device_seconds = clock.device_seconds(call, prepare, device, len(row.seconds)) or []
    if not watch:
        return
    args = prepare()
    row.peak_bytes = memory.peak_bytes(lambda: call(*args), device)
    if device.type == "cpu":
        args = prepare()
        row.resident_bytes = memory.resident_bytes(lambda: call(*args))


def timed_call(function: Function, args: list[torch.Tensor], direction: str) -> tuple[clock.Call, clock.Prepare]:
    """Return the call to time, and the untimed function that prepares its arguments."""
    if direction == "forward":

        def forward() -> object:
            with torch.no_grad():
                return function(*args)

        return forward, tuple
    g = upstream(function(*args).detach())

    def backward(out: torch.Tensor) -> object:
        return torch.autograd.grad(out, args, g)

    def both() -> object:
        return torch.autograd.grad(function(*args), args, g)

    def graph() -> tuple[Any, ...]:
        return (function(*args),)

    return (backward, graph) if direction == "backward" else (both, tuple)
