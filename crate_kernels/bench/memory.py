"""Measures the peak memory of a call, and limits memory so that running out raises an exception."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# Memory that a container may use: cgroup v2, v1.
_CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of tensors during ``call``, less the bytes before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # without it, PyTorch's profiler writes to stderr when it starts
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocated = peak = 0
    for _, change in sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"):
        allocated += change
        peak = max(peak, allocated)
    return peak


def resident_bytes(call: Callable[[], object]) -> int | None:
    """Return the peak rise of the process's resident memory during ``call``; None if Linux does not report it.

    This includes a kernel's own scratch memory, ``peak_bytes`` does not.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark to the present value
        before = _status_bytes("VmRSS")
        call()
        return max(_status_bytes("VmHWM") - before, 0)
    except (OSError, TypeError):
        return None


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])  # pyright: ignore[reportOptionalSubscript]  its TypeError is caught


@contextmanager
def limited(device: torch.device, share: float = 0.8) -> Iterator[None]:
    """Make an allocation beyond a share of the memory raise, as on a GPU, instead of killing the process.

    The memory is this machine's, or its container's; a limit that is already lower stays. A system that refuses the
    limit goes without.
    """
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        yield
        return
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * page if Path("/proc/self/statm").exists() else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    allowed = [in_use + int(share * _available(os.sysconf("SC_PHYS_PAGES") * page))]
    allowed += [limit for limit in before if limit != resource.RLIM_INFINITY]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (min(allowed), before[1]))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)


def _available(machine: int) -> int:
    """Return the bytes that this process may use of a machine's memory."""
    found = [machine]
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int(path.read_text()))
    return min(found)


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def release() -> None:
    """Free cached GPU memory, so that the next measurement can use all of it."""
    torch.cuda.empty_cache()
