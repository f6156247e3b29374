"""The design goals of the library, the measured ratios, and the reason for each missed goal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks import profiled
from benchmarks.cells import OPERATORS
from crate_kernels.bench import overhead
from crate_kernels.bench.providers import DEFAULT, OURS
from crate_kernels.bench.rows import CLOCKS, BenchRow, Results


@dataclass(frozen=True)
class Goal:
    """A ratio that a case should reach.

    Attributes:
        what: the operator and direction, in words.
        target: minimum time of ``baseline`` as a multiple of ours; for overhead, the maximum of microseconds.
        baseline: the provider, or "best sdpa" of them; "stream" of the same bytes and "product" of the same work, at
            the rates of the machine; "eager's memory" in the place of its time.
        bench, direction, dtype, cases: select our rows.
        reason: the limit, for a case that misses the goal.
        clock: one of ``CLOCKS``; None takes the first that timed a row.
        alone: kernels timed alone, of ``tables.alone``, that stand for the cases where these were not timed.
    """

    what: str
    target: float
    baseline: str
    bench: str
    direction: str
    dtype: str
    cases: tuple[str, ...]
    reason: str = ""
    clock: str | None = None
    alone: tuple[str, ...] = ()


_VIT, _LM, _LONG = (tuple(f"{stem}-d{head_dim}" for head_dim in (48, 64)) for stem in ("vit-197", "lm-1024", "lm-4096"))


def _causal(*cases: str) -> tuple[str, ...]:
    return tuple(f"{case}-causal" for case in cases)


_EDGES = "at 197 tokens a seventh of the tiles' area lies beyond the edge and the diagonal; row epilogues and packing"
_FMA = "multiply-adds: at 1024 tokens the goal would be 93 to 96% of their peak (docs/cpu.md)"
_ONE_WAY = "of two tokens one sees the other: the products are SDPA's, none shared; FMA throughput"
_BF16 = "multiply-adds: at 1024 tokens 82 to 90% of their peak on a Zen 4; on Intel bf16 has fp32's rate (docs/cpu.md)"
_CALL = "the call and cold caches: the kernel's own work is tens of microseconds"
_CONVERT = "half the bytes move, so the conversions to fp32 and back count"
_PRODUCTS = "the library's own products, two thirds of the time and more"
_IMAGES = ("vit-196-many", "vit-784", "lm-1024", "long-4096")
_FEW = ("vit-196-one", "vit-196")
_TRITON = "timed with Triton's kernels; no GPU has timed those for Hopper (docs/cuda.md)"
_ELEMENTWISE = "the elementwise pass moved 2 bytes at a time when this was timed"

GOALS = (
    Goal("mssa forward", 1.75, "sdpa", "mssa", "forward", "fp32", (*_VIT, *_LM, *_LONG), _EDGES + "; " + _FMA),
    Goal("mssa forward, causal", 1.2, "sdpa", "mssa", "forward", "fp32", _causal(*_VIT, *_LM, *_LONG), _ONE_WAY),
    Goal("mssa forward and backward, 197 tokens", 2.1, "sdpa", "mssa", "both", "fp32", _VIT, _EDGES),
    Goal("mssa forward and backward, longer", 1.9, "sdpa", "mssa", "both", "fp32", (*_LM, *_LONG), _FMA),
    Goal(
        "mssa forward and backward, causal", 1.4, "sdpa", "mssa", "both", "fp32", _causal(*_VIT, *_LM, *_LONG), _ONE_WAY
    ),
    Goal("mssa forward", 3.2, "sdpa", "mssa", "forward", "bf16", (*_VIT, *_LM, *_LONG), _EDGES + "; " + _BF16),
    Goal("mssa forward", 2.2, "eager", "mssa", "forward", "bf16", (*_VIT, *_LM, *_LONG), _EDGES),
    Goal("mssa forward and backward", 3.0, "sdpa", "mssa", "both", "bf16", (*_VIT, *_LM, *_LONG), _BF16),
    Goal("tssa forward", 6.0, "eager", "tssa", "forward", "fp32", _IMAGES, "memory"),
    Goal("tssa forward, few tokens", 6.0, "eager", "tssa", "forward", "fp32", _FEW, _CALL),
    Goal("tssa forward and backward", 5.0, "eager", "tssa", "both", "fp32", _IMAGES, "memory"),
    Goal("tssa forward and backward, few tokens", 5.0, "eager", "tssa", "both", "fp32", _FEW, _CALL),
    Goal("tssa forward, causal", 8.0, "eager", "tssa", "forward", "fp32", _causal(*_IMAGES), "memory"),
    Goal("tssa forward, causal, few tokens", 8.0, "eager", "tssa", "forward", "fp32", _causal(*_FEW), _CALL),
    Goal("tssa forward and backward, causal", 6.0, "eager", "tssa", "both", "fp32", _causal(*_IMAGES), "memory"),
    Goal("tssa forward and backward, causal, few", 6.0, "eager", "tssa", "both", "fp32", _causal(*_FEW), _CALL),
    Goal("tssa forward", 6.0, "eager", "tssa", "forward", "bf16", _IMAGES, _CONVERT),
    Goal("tssa forward and backward", 5.0, "eager", "tssa", "both", "bf16", _IMAGES, _CONVERT),
    Goal("ista forward", 2.35, "eager", "ista", "forward", "fp32", ("tokens-1576",), _PRODUCTS),
    Goal("ista forward and backward", 2.5, "eager", "ista", "both", "fp32", ("tokens-1576",), _PRODUCTS),
    Goal("ista forward", 3.2, "eager", "ista", "forward", "fp32", ("tokens-12608",), _PRODUCTS),
    Goal("ista forward and backward", 2.9, "eager", "ista", "both", "fp32", ("tokens-12608",), _PRODUCTS),
    Goal("CRATE-S forward, batch 8", 1.8, "eager", "models", "forward", "fp32", ("crate_small",), _PRODUCTS),
    Goal("CRATE-S training step, batch 8", 1.8, "eager", "models", "step", "fp32", ("crate_small",), _PRODUCTS),
    Goal("CRATE-S forward, batch 8", 2.2, "eager", "models", "forward", "bf16", ("crate_small",), _PRODUCTS),
    Goal("CRATE-S training step, batch 8", 2.2, "eager", "models", "step", "bf16", ("crate_small",), _PRODUCTS),
)
_OVERHEAD = (("public", "no gradient", 8.0), ("public with gradient", "forward with gradient", 20.0))
_AS_THE_DEVICE, _HOST = 0.9, "what a call costs the host"
_HOST_MAX = {
    "mssa": 1.0,
    "mssa causal": 1.0,
    "tssa": 1.5,
    "tssa causal": 1.5,
    "ista": 1.5,
}  # times PyTorch's attention
_BEST_SDPA, _STREAM, _PRODUCT, _MEMORY = "best sdpa", "stream", "product", "eager's memory"


_GPU_VIT, _GPU_SPARSE = ("vit-197-d64",), ("crate-b", "lm-base")
_GPU_CACHES = ("64x12x64-cached-4096", "16x16x128-cached-16384", "1x16x128-cached-65536")
_CRATE_STEPS, _TOST_STEP = ("crate_base", "crate_lm_base"), ("tost_small_12",)
_CRATE_STEP = "CRATE-B and causal CRATE, training step"

GPU_GOALS = (
    *(
        Goal(
            f"mssa {direction}, 197 tokens",
            target,
            _BEST_SDPA,
            "mssa",
            direction,
            "bf16",
            _GPU_VIT,
            _TRITON,
            alone=(f"mssa vit-197 {direction}, as profiled",),
        )
        for direction, target in (("forward", 2.1), ("backward", 3.1))
    ),
    *(
        Goal(f"mssa forward and backward, {words}", target, _BEST_SDPA, "mssa", "both", "bf16", cases, _TRITON)
        for words, target, cases in (
            ("197 tokens", 2.5, _GPU_VIT),
            ("1024 tokens, causal", 1.4, ("lm-1024-d64-causal",)),
            ("16k tokens", 1.25, ("long-16k-d64",)),
            ("4096 tokens, head_dim 128", 1.2, ("lm-4096-d128",)),
            ("16k tokens, head_dim 128, causal", 1.05, ("long-16k-d128-causal",)),
        )
    ),
    Goal(
        "mssa decode, 256 MB of cache and more",
        1.0,
        _STREAM,
        "decode",
        "forward",
        "bf16",
        _GPU_CACHES,
        alone=("mssa decode (16, 12, 8193, 128), as tuned",),
    ),
    *(
        Goal(f"tssa forward and backward{comma}", target, baseline, "tssa", "both", "bf16", (case,), reason)
        for comma, case, compiled, reason in (
            ("", "vit-196", 4.0, "8 passes over w, 5 are the minimum"),
            (", causal", "lm-1024-causal", 3.5, "13 passes over w, 5 are the minimum"),
        )
        for baseline, target in ((_STREAM, 0.8), ("compile", compiled))
    ),
    Goal(
        "ista forward",
        0.9,
        _PRODUCT,
        "ista",
        "forward",
        "bf16",
        _GPU_SPARSE,
        "no GPU has timed the persistent product",
        alone=("ista product (25216, 768), as tuned",),
    ),
    Goal("ista forward and backward", 3.4, "eager", "ista", "both", "bf16", _GPU_SPARSE, _ELEMENTWISE),
    Goal("ista_overcomplete forward and backward", 1.15, "compile", "ista", "both", "bf16", ("alpha-b",), _PRODUCTS),
    Goal(_CRATE_STEP, 2.2, "compile", "models", "step", "bf16", _CRATE_STEPS, clock="device"),
    Goal(f"{_CRATE_STEP}, from Python", 2.0, "eager", "models", "step", "bf16", _CRATE_STEPS, clock="loop"),
    Goal("ToST-S, training step", 1.1, "compile", "models", "step", "bf16", _TOST_STEP, clock="device"),
    Goal("ToST-S, training step, from Python", 1.3, "eager", "models", "step", "bf16", _TOST_STEP, clock="loop"),
    Goal("training steps", 1.67, _MEMORY, "models", "step", "bf16", (*_CRATE_STEPS, *_TOST_STEP)),
)


def ratios(results: Results, goal: Goal) -> list[tuple[BenchRow, float]]:
    """Return, for every case of a goal that has both, our row and the baseline as a multiple of it."""
    results = results.by(goal.clock) if goal.clock else results
    found = []
    for case in goal.cases:
        beside = results.find(bench=goal.bench, case=case, dtype=goal.dtype, direction=goal.direction)
        ours = results.best(beside[0]) if beside else None
        ratio = None if ours is None else _ratio(results, goal.baseline, beside, ours)
        if ours is not None and ratio is not None:
            found.append((ours, ratio))
    return found


def _ratio(results: Results, baseline: str, beside: list[BenchRow], ours: BenchRow) -> float | None:
    """Return a baseline's time or memory as a multiple of ours; None where the results lack it."""
    rates = results.machine
    if baseline == _STREAM:
        return ours.bytes / profiled.stream_bytes(results) / ours.time if ours.bytes else None
    if baseline == _PRODUCT:
        return ours.flops / rates["product_flops"][ours.dtype] / ours.time if ours.flops else None
    if baseline == _MEMORY:
        eager = next((row.peak_bytes for row in beside if row.provider == "eager"), None)
        return eager / ours.peak_bytes if eager and ours.peak_bytes else None
    best = baseline == _BEST_SDPA
    times = [r.time for r in beside if r.times and (r.provider.startswith("sdpa") if best else r.provider == baseline)]
    return min(times) / ours.time if times else None


def lines(results: Results, alone: Mapping[str, float] = MappingProxyType({})) -> Iterable[list[str]]:
    """Yield (goal, dtype, target, measured per case, met, reason) for every goal of the results' kind of device.

    ``alone`` has ratios of kernels that were timed alone: they stand for a goal whose cases were not timed otherwise.
    """
    on_gpu = results.machine["gpu"]
    for goal in GPU_GOALS if on_gpu else GOALS:
        found = [(row.case, ratio) for row, ratio in ratios(results, goal)]
        found = found or [(name, alone[name]) for name in goal.alone if name in alone]
        missed = [ratio for _, ratio in found if round(ratio, 2) < goal.target]
        verdict = (
            "not measured" if not found else "yes" if not missed else f"{len(found) - len(missed)} of {len(found)}"
        )
        measured = ", ".join(f"{case} {ratio:.2f}" for case, ratio in found)
        yield [
            goal.what,
            goal.dtype,
            f"{goal.target:g} x {goal.baseline}",
            measured,
            verdict,
            (goal.reason or "not known") if missed else "",
        ]
    if on_gpu:
        yield _of_both_clocks(results)
    for provider, what, maximum in () if on_gpu else _OVERHEAD:
        costs = {op: _overhead(results, op, provider) for op in overhead.OPS}
        measured = ", ".join(f"{op} {cost:.1f}" for op, cost in costs.items() if not math.isnan(cost))
        verdict = "yes" if all(cost <= maximum for cost in costs.values()) else "no" if measured else "not measured"
        reason = "Python around the op: checks, the choice of a backend, autograd" if verdict == "no" else ""
        yield [f"public call over the raw op, {what}", "fp32", f"at most {maximum:g} us", measured, verdict, reason]


def host_line(host: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the line of the goal for the host's time, of what ``make host`` wrote; it is kept by each column."""
    worst = {
        call: max(host[call][kind] / host["sdpa"][kind] for kind in host["sdpa"] if kind != "of") for call in _HOST_MAX
    }
    met = sum(round(ratio, 2) <= _HOST_MAX[call] for call, ratio in worst.items())
    measured = ", ".join(f"{call} {ratio:.2f}" for call, ratio in worst.items())
    verdict = f"{met} of {len(worst)}, with a driver that does nothing"
    return [
        "the host's time of a call",
        "bf16",
        "at most 1 x sdpa, tssa and ista 1.5",
        measured,
        verdict,
        "no GPU has timed it",
    ]


def _of_both_clocks(results: Results) -> list[str]:
    """Return the line of the goal that calls from Python are ahead of others' as their kernels are.

    A call from Python is one in a loop, or of those one by one where the results have no loop.
    """
    device, loop, calls = (results.by(clock) for clock in CLOCKS)
    found = []
    for row in device.find(provider="default"):
        called = next((c for c in (loop, calls) if "default" in c.in_group(row)), None)
        ahead = [_ahead(one.in_group(row)) for one in (device, called) if one is not None and row.bench in OPERATORS]
        if len(ahead) == 2 and all(ahead):
            found.append((row.case, row.direction, ahead[1] / ahead[0]))
    missed = [ratio for *_, ratio in found if round(ratio, 2) < _AS_THE_DEVICE]
    met = "not measured" if not found else "yes" if not missed else f"{len(found) - len(missed)} of {len(found)}"
    measured = ", ".join(f"{case} {direction} {ratio:.2f}" for case, direction, ratio in found)
    target = f"{_AS_THE_DEVICE:g} x the device's"
    return ["best other over ours, from Python", "all", target, measured, met, _HOST if missed else ""]


def _ahead(beside: dict[str, BenchRow]) -> float:
    """Return the time of the best other as a multiple of ours; 0 without another."""
    others = [row.time for name, row in beside.items() if name not in (DEFAULT, *OURS)]
    return min(others, default=0.0) / beside[DEFAULT].time


def _overhead(results: Results, op: str, provider: str) -> float:
    times = {row.provider: row.time for row in results.find(bench="overhead", op=op)}
    spent = times.get(provider, math.nan) - times.get("raw op", math.nan)
    return 1e6 * spent / overhead.CALLS
