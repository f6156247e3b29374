"""Times calls on the host and on the device, and measures the rates that this machine reaches in the same run."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

Prepare = Callable[[], tuple[Any, ...]]
Call = Callable[..., object]
LONG = 5.0
_LONG_ENOUGH = 0.1
_LOOPS = 3


def synchronize(device: torch.device) -> None:
    """Wait for launched kernels; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounds_for(seconds: float, budget: float, minimum: int = 3, maximum: int = 50) -> int:
    """Return how many calls of ``seconds`` fit into a time budget."""
    return max(minimum, min(maximum, int(budget / max(seconds, 1e-7))))


def once(call: Call, prepare: Prepare, device: torch.device) -> float:
    """Return the seconds of one call; preparing its arguments is not timed."""
    args = prepare()
    synchronize(device)
    start = perf_counter()
    call(*args)
    synchronize(device)
    return perf_counter() - start


def host_seconds(call: Call, prepare: Prepare, device: torch.device, budget: float) -> list[float]:
    """Time calls on the host after two warm-up calls; if the second is longer than ``LONG``, time only one more."""
    return [once(call, prepare, device) for _ in range(warm_rounds(call, prepare, device, budget))]


def warm_rounds(call: Call, prepare: Prepare, device: torch.device, budget: float) -> int:
    """Make two warm-up calls, of which the first may compile; return how many calls to time."""
    once(call, prepare, device)
    seconds = once(call, prepare, device)
    return 1 if seconds > LONG else rounds_for(seconds, budget)


def loop_seconds(call: Call, prepare: Prepare, device: torch.device, single: Sequence[float]) -> list[float]:
    """Time calls in loops that are synchronised at their end only, as a training is; return seconds a call.

    As many calls are made as were timed as ``single`` calls; where these are few, a loop is one of them.
    On a GPU the device works while Python makes the next call, so that the slower of the two counts. What is prepared
    before each call (``prepare`` is not ``tuple``) has no loop: the preparation would be in it.
    """
    if prepare is not tuple:
        return []
    found, each = [], len(single) // _LOOPS
    if each < 2:
        return [*single]
    for _ in range(_LOOPS):
        synchronize(device)
        start = perf_counter()
        for _ in range(each):
            call()
        synchronize(device)
        found.append((perf_counter() - start) / each)
    return found


def device_seconds(call: Call, prepare: Prepare, device: torch.device, rounds: int) -> list[float] | None:
    """Time calls by events on a GPU, each after overwriting its L2 cache; None on a CPU.

    A call without arguments is captured in a CUDA graph if possible: a replay has no launch overhead, so only the
    device's own time is left. ``prepare`` runs before every call and every replay, outside of the graph. It must not
    move tensors.
    """
    if device.type != "cuda":
        return None
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    replay = None if prepare() else _capture_graph(call, prepare, device)
    times = []
    for _ in range(rounds):
        args = prepare()
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if replay is None:
            call(*args)
        else:
            replay()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop) / 1e3)
    return times


def _capture_graph(call: Call, prepare: Prepare, device: torch.device) -> Callable[[], None] | None:
    """Return a replay of ``call`` from a CUDA graph; None if it cannot be captured."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                prepare()
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # the call synchronises, or allocates in a way that graphs refuse
        torch.cuda.synchronize(device)
        return None
    return graph.replay


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a large square product by PyTorch's library in this run.

    On a CPU the product grows until it takes long enough to time: one without arithmetic in 16 bits would take minutes
    for the largest.
    """
    size = 8192 if device.type == "cuda" else 256
    multiply = _product(size, dtype, device)
    while size < 2048 and once(multiply, tuple, device) < _LONG_ENOUGH:
        size *= 2
        multiply = _product(size, dtype, device)
    return 2.0 * size**3 / _median_seconds(multiply, device)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Call:
    return functools.partial(torch.mm, *(torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)))


def copy_bytes(device: torch.device) -> float:
    """Return the bytes per second, reads plus writes, of a stream larger than any cache in this run.

    The stream is PyTorch's copy or its addition of a number, whichever is faster: on an H200 the copy of its driver is
    the slower one by far.
    """
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    streams: tuple[Call, ...] = (lambda: b.copy_(a), lambda: torch.add(a, 1.0, out=b))
    return 2.0 * size / min(_median_seconds(stream, device) for stream in streams)


def _median_seconds(call: Call, device: torch.device) -> float:
    host = host_seconds(call, tuple, device, 0.5)
    return statistics.median(device_seconds(call, tuple, device, len(host)) or host)
