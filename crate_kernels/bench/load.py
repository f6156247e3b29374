"""Counts the free cores: if other processes use cores, threads wait for them and times mean nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SECONDS = 0.3


@dataclass(frozen=True)
class Load:
    """The load of the machine.

    Attributes:
        cores: number of cores that this process may use; a container's quota may end within a core.
        free: how many of them nobody used.
    """

    cores: float
    free: float

    @property
    def busy(self) -> bool:
        """True if other processes use half a core or more."""
        return self.cores - self.free >= 0.5

    @property
    def threads(self) -> int:
        """Number of threads that get a core each, at least one."""
        return max(1, int(self.free + 0.5))

    def __str__(self) -> str:
        return f"{self.free:.1f} of {self.cores:g} cores free"


def measure(seconds: float = _SECONDS) -> Load:
    """Watch the cores that this process may use for ``seconds``, while it sleeps.

    A container's quota limits both numbers. If the system does not report idle times, use the load average, which
    covers a minute.
    """
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    before = _idle_ticks()
    if before is None:
        free = len(mine) - (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    else:
        time.sleep(seconds)
        after = _idle_ticks() or before
        free = sum(_idle_share(before[core], after[core]) for core in mine if core in before and core in after)
    cores = min(len(mine), _quota(len(mine)))
    return Load(cores, max(0.0, min(free, cores)))


def share_cores(device: torch.device, say: Callable[[str], object]) -> None:
    """Limit PyTorch to the free cores before work on a CPU, and say so if that is fewer threads than before."""
    if device.type == "cpu" and torch.get_num_threads() > 1:
        limit_threads(measure(), say)


def limit_threads(load: Load, say: Callable[[str], object]) -> None:
    """Limit PyTorch to one thread per free core: a thread that waits for a core delays the others."""
    threads = torch.get_num_threads()
    if load.threads < threads:
        torch.set_num_threads(load.threads)
        number = "1 thread" if load.threads == 1 else f"{load.threads} threads"
        reason = "others are at work on this machine" if load.busy else "this process may use no more"
        say(f"{load}, {reason}: {number} instead of {threads}, and all takes longer")


def _idle_ticks() -> dict[int, tuple[int, int]] | None:
    """Return the idle and the total time of each core, in ticks; None if the system does not report them."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return None
    found = {}
    for name, *ticks in (line.split() for line in lines if line.startswith("cpu")):
        if name != "cpu":
            user, nice, system, idle, waiting, *others = (int(tick) for tick in ticks[:8])
            found[int(name[3:])] = idle + waiting, user + nice + system + idle + waiting + sum(others)
    return found


def _idle_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    idle, total = (a - b for a, b in zip(after, before, strict=True))
    return idle / total if total > 0 else 1.0


def _quota(cores: int) -> float:
    """Return the container's CPU quota in cores; ``cores`` without a limit."""
    try:
        quota, period = _QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return cores
