"""Times the providers of a case interleaved, with cold caches: in a model, others' work lies between two calls."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from time import perf_counter

import torch

from crate_kernels._core.spec import Provider
from crate_kernels.bench import clock, measuring
from crate_kernels.bench.gate import gate
from crate_kernels.bench.rows import DTYPES, INTERLEAVED, BenchRow
from crate_kernels.testing import Timed

DIRECTIONS = ("forward", "both")
_BETWEEN = 1 << 26  # bytes that are written between two calls; more than a CPU's last cache
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50


def blank(timed: Timed, dtype: str, direction: str, provider: str) -> BenchRow:
    """Return the row of a provider, without results."""
    return measuring.blank(INTERLEAVED, timed, dtype, direction, provider)


def measure(
    rows: Sequence[BenchRow], timed: Timed, providers: Sequence[Provider], device: torch.device, seconds: float
) -> None:
    """Fill in the rows, one per provider, of one case, dtype and direction.

    Args:
        rows: rows of ``blank``.
        timed: the case.
        providers: the provider of each row.
        device: the device, a CPU.
        seconds: time for each provider; at least five calls are timed.
    """
    dtype, direction = DTYPES[rows[0].dtype], rows[0].direction
    exact = gate(timed.case, dtype, device)
    calls = []
    for row, provider in zip(rows, providers, strict=True):
        reason = provider.unavailable_reason(timed.case, dtype, device)
        if direction != "forward" and device.type in provider.inference_only:
            reason = f"{provider.name} has no backward pass on this device"
        if reason is not None:
            row.skipped = reason
            continue
        function = provider.make(timed.case)
        verdict = exact.check(function, direction != "forward")
        measuring.record_verdict(row, verdict)
        if verdict.passed:
            calls.append((row, measuring.timed_call(function, exact.args, direction)[0]))
    measure_calls(calls, seconds)


def measure_calls(calls: Sequence[tuple[BenchRow, clock.Call]], seconds: float) -> None:
    """Time calls interleaved, and write to memory between them; the samples go into the rows.

    Each round has another order: a call finds the memory that the one before has freed.
    """
    between = torch.zeros(_BETWEEN, dtype=torch.int8)
    # A provider that is made may discard what another compiled: all are warmed up once all are there.
    longest = max((clock.once(call, tuple, between.device) for _, call in 2 * list(calls)), default=0.0)
    draw = random.Random(0)
    for _ in range(clock.rounds_for(longest, seconds, _MIN_ROUNDS, _MAX_ROUNDS)):
        for row, call in draw.sample(calls, len(calls)):
            between.add_(1)
            start = perf_counter()
            call()
            row.seconds.append(perf_counter() - start)
    for row, _ in calls:
        row.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
