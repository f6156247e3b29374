"""Kernels of single calls as PyTorch's profiler timed them, from ``profile.jsonl`` beside a GPU's results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from crate_kernels.bench.rows import Results

FOLDER = Path(__file__).parent / "results"
_SUMS, _FILLS = "CUDAFunctor_add", "FillFunctor"
_FORWARD = ("_fwd_", "fprop")  # in the names of a forward's kernels


def lines(results: Results, name: str) -> Iterator[dict]:
    """Yield the lines of a file beside the results of a GPU; none where there is no such file."""
    path = FOLDER / results.machine.get("device", "none").lower().replace(" ", "-") / name
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        yield json.loads(line)


def stream_bytes(results: Results) -> float:
    """Return the bytes per second of a stream: that of the results' runs, or PyTorch's sums of two 16-bit tensors.

    Where the runs timed a copy alone, such a sum is the faster stream by far.
    """
    rates = [
        3 * count * 2 * math.prod(line["shape"]) / (1e-6 * micros)
        for line in lines(results, "profile.jsonl")
        for name, micros, count in line["kernels"]
        if _SUMS in name
    ]
    return max(results.machine["copy_bytes"], statistics.median(rates) if rates else 0.0)


def over_the_best_sdpa(results: Results) -> dict[str, float]:
    """Return the time of the faster of PyTorch's attentions as a multiple of Triton's, by case and direction.

    A direction has all its kernels, but not the sums of the gradients of three equal inputs, nor the filling of dout.
    """
    micros: dict[str, dict[str, float]] = {}
    for line in lines(results, "profile.jsonl"):
        case, _, provider = line["call"].rpartition(" ")
        for name, time, _ in line["kernels"]:
            if _SUMS not in name and _FILLS not in name:
                direction = "forward" if any(part in name for part in _FORWARD) else "backward"
                times = micros.setdefault(f"{case} {direction}", {})
                times[provider] = times.get(provider, 0.0) + time
    return {
        call: min(times[other] for other in ("flash", "cudnn")) / times["triton"]
        for call, times in micros.items()
        if {"triton", "flash", "cudnn"} <= times.keys()
    }
