"""The design goals of the library, the measured ratios, and the reason for each missed goal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from crate_kernels.bench import overhead
from crate_kernels.bench.rows import Results, Row


@dataclass(frozen=True)
class Goal:
    """A ratio that a case should reach.

    Attributes:
        what: the operator and direction, in words.
        target: least time of ``baseline`` as a multiple of ours; for overhead, the most microseconds.
        baseline: the provider.
        bench, direction, dtype, cases: select our rows.
        reason: the limit, for a case that misses the goal.
    """

    what: str
    target: float
    baseline: str
    bench: str
    direction: str
    dtype: str
    cases: tuple[str, ...]
    reason: str = ""


_VIT, _LM, _LONG = (tuple(f"{stem}-d{head_dim}" for head_dim in (48, 64)) for stem in ("vit-197", "lm-1024", "lm-4096"))


def _causal(*cases: str) -> tuple[str, ...]:
    return tuple(f"{case}-causal" for case in cases)


_EDGES = "at 197 tokens a seventh of the tiles' area lies beyond the edge and the diagonal; row epilogues and packing"
_FMA = "multiply-adds: 1.75 times forward would be 94% of their peak, 1.9 times with the backward 96% (docs/cpu.md)"
_ONE_WAY = "of two tokens one sees the other: the products are SDPA's, none shared; FMA throughput"
_SAME_RATE = "bf16 has float32's products here, which allow 2.96 times SDPA at 1024 tokens (docs/cpu.md)"
_CALL = "the call and cold caches: the kernel's own work is tens of microseconds"
_CONVERT = "half the bytes move, so the conversions to fp32 and back count"
_PRODUCTS = "the library's own products, two thirds of the time"
_IMAGES = ("vit-196-many", "vit-784", "lm-1024", "long-4096")
_FEW = ("vit-196-one", "vit-196")

GOALS = (
    Goal("mssa forward", 1.75, "sdpa", "mssa", "forward", "fp32", (*_VIT, *_LM, *_LONG), _EDGES + "; " + _FMA),
    Goal("mssa forward, causal", 1.2, "sdpa", "mssa", "forward", "fp32", _causal(*_VIT, *_LM, *_LONG), _ONE_WAY),
    Goal("mssa forward and backward, 197 tokens", 2.1, "sdpa", "mssa", "both", "fp32", _VIT, _EDGES),
    Goal("mssa forward and backward, longer", 1.9, "sdpa", "mssa", "both", "fp32", (*_LM, *_LONG), _FMA),
    Goal(
        "mssa forward and backward, causal", 1.4, "sdpa", "mssa", "both", "fp32", _causal(*_VIT, *_LM, *_LONG), _ONE_WAY
    ),
    Goal("mssa forward", 3.2, "sdpa", "mssa", "forward", "bf16", (*_VIT, *_LM, *_LONG), _SAME_RATE),
    Goal("mssa forward", 2.2, "eager", "mssa", "forward", "bf16", (*_VIT, *_LM, *_LONG), _SAME_RATE),
    Goal("mssa forward and backward", 3.0, "sdpa", "mssa", "both", "bf16", (*_VIT, *_LM, *_LONG), _SAME_RATE),
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
# Goals for GPUs. No GPU has run the benchmarks yet.
GPU_GOALS = (
    "mssa forward, up to 1024 tokens or head_dim 48: 1.2 times the best SDPA backend",
    "mssa forward, long, head_dim 64: 1.0 times the best SDPA backend, 1.3 times SDPA-flash",
    "mssa forward, long, head_dim 128: 1.0 times SDPA-flash",
    "mssa backward: 1.4 times SDPA-flash",
    "mssa decode, 256 MB of cache and more: 85% of copy bandwidth, 1.8 times SDPA",
    "tssa: 80% of copy bandwidth, 3.5 times eager (causal 8 times), 2.5 times torch.compile of it",
    "ista: 90% of a plain product forward; 2.7 times eager, 2.5 times with the backward",
    "CRATE-B, ToST-S, causal CRATE training step: 2.5 times eager, 1.4 times torch.compile of it, 60% of the memory",
)


def ratios(results: Results, goal: Goal) -> list[tuple[Row, float]]:
    """Return, for every timed case of a goal, our row and the baseline's time as a multiple of ours."""
    found = []
    for case in goal.cases:
        beside = results.find(bench=goal.bench, case=case, dtype=goal.dtype, direction=goal.direction)
        baseline = next((row for row in beside if row.provider == goal.baseline and row.times), None)
        ours = results.best(baseline) if baseline else None
        if baseline is not None and ours is not None:
            found.append((ours, baseline.time / ours.time))
    return found


def cpu_lines(results: Results) -> Iterable[list[str]]:
    """Yield (goal, dtype, target, measured per case, met, reason) for every CPU goal."""
    for goal in GOALS:
        found = ratios(results, goal)
        missed = [ratio for _, ratio in found if round(ratio, 2) < goal.target]
        verdict = (
            "not measured" if not found else "yes" if not missed else f"{len(found) - len(missed)} of {len(found)}"
        )
        measured = ", ".join(f"{row.case} {ratio:.2f}" for row, ratio in found)
        yield [
            goal.what,
            goal.dtype,
            f"{goal.target:g} x {goal.baseline}",
            measured,
            verdict,
            (goal.reason or "not known") if missed else "",
        ]
    for provider, what, most in _OVERHEAD:
        costs = {op: _overhead(results, op, provider) for op in overhead.OPS}
        measured = ", ".join(f"{op} {cost:.1f}" for op, cost in costs.items() if not math.isnan(cost))
        verdict = "yes" if all(cost <= most for cost in costs.values()) else "no" if measured else "not measured"
        reason = "Python around the op: checks, the choice of a backend, autograd" if verdict == "no" else ""
        yield [f"public call over the raw op, {what}", "fp32", f"at most {most:g} us", measured, verdict, reason]


def _overhead(results: Results, op: str, provider: str) -> float:
    times = {row.provider: row.time for row in results.find(bench="overhead", op=op)}
    spent = times.get(provider, math.nan) - times.get("raw op", math.nan)
    return 1e6 * spent / overhead.CALLS
