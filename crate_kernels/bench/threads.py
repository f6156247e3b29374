"""Times a training step on few threads, on many, and on a machine whose cores others use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from crate_kernels import models
from crate_kernels.bench import interleaved, networks
from crate_kernels.bench.rows import BenchRow

NAME, BATCH = "crate_tiny", 4
PROVIDERS = ("eager", "default")
_BUSY = "while True: pass"


def situations() -> dict[str, tuple[int, int]]:
    """Return the number of threads, and of busy processes beside them, by name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = {f"{n} thread{'s' * (n > 1)}": (n, 0) for n in sorted({1, min(2, cores), cores})}
    return alone | {f"{cores} threads, {cores} others": (cores, cores)}


def blank(situation: str, provider: str) -> BenchRow:
    """Return the row of a situation, without results."""
    return BenchRow("threads", "model", situation, "fp32", "step", provider, unit="images", amount=float(BATCH))


@contextmanager
def crowded(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy, each as much of a core as it gets."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        time.sleep(0.2 * bool(busy))
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(rows: list[BenchRow], threads: int, others: int, seconds: float) -> None:
    """Time a training step of each provider, interleaved: "eager", the reference implementation, and "default"."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with crowded(others):
            interleaved.measure_calls([(row, _step(row.provider)) for row in rows], seconds)
    finally:
        torch.set_num_threads(before)


def _step(provider: str) -> interleaved.clock.Call:
    torch.manual_seed(0)
    model = models.create(NAME, backend="composite" if provider == "eager" else None).train()
    model = networks.published_form(model) if provider == "eager" else model
    x, y = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()

    return step
