"""Figures of a file of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from crate_kernels._core import backends, spec
from crate_kernels.bench.drawing import BLUE, GREEN, GREY, ORANGE, PINK, SKY, axes
from crate_kernels.bench.rows import BenchRow, Results
from crate_kernels.testing import SPECS

_STYLES = {
    "eager": (GREY, "o"),
    "compile": (PINK, "v"),
    "sdpa": (ORANGE, "s"),
    "flex": (ORANGE, "x"),
    "composite": (SKY, "^"),
    "default": ("black", "+"),
    "cpp": (BLUE, "D"),
    "triton": (GREEN, "P"),
}
_LABELS = {
    "compile": "torch.compile of eager",
    "sdpa": "SDPA(w, w, w)",
    "flex": "FlexAttention",
}
_SHORT = {"compile": "torch.compile", "sdpa": "SDPA"}
_SWEEPS = {op: spec.sweep for op, spec in SPECS.items() if spec.sweep is not None}
_MULTIPLYING = [op for op, sweep in _SWEEPS.items() if SPECS[op].work(sweep.image.case).flops is not None]
_SIZES = {"seqlen": "tokens", "batch": "batch", "dim": "width"}
_OURS = ("triton", "cpp")
_BASELINES = ("eager", "compile", "sdpa")


@dataclass(frozen=True)
class Series:
    """One provider along one sweep.

    Attributes:
        provider: name of the provider.
        sizes: the sizes with times.
        rows: the row of each size.
        exhausted: the first size at which memory ran out; None if there is none.
    """

    provider: str
    sizes: list[int]
    rows: list[BenchRow]
    exhausted: int | None

    def exponent(self, values: list[float]) -> float | None:
        """Fit ``value ~ size ** exponent`` by least squares over the largest half of the sizes, three at least."""
        count = max(3, len(self.sizes) // 2)
        if len(self.sizes) < 3 or min(values[-count:]) <= 0:
            return None
        slope, _ = np.polyfit(np.log(self.sizes[-count:]), np.log(values[-count:]), 1)
        return float(slope)

    @property
    def seconds(self) -> list[float]:
        """Time at each size."""
        return [row.time for row in self.rows]

    @property
    def memory(self) -> list[float]:
        """Peak bytes at each size: of tensors, or of the process if its own scratch memory makes that more."""
        return [float(max(row.peak_bytes or 0, row.resident_bytes or 0)) for row in self.rows]


def size_of(row: BenchRow) -> int:
    """Return a row's value of the size that its sweep varies."""
    return spec.size_of(row.shape, SPECS[row.op].axes, row.sweep)


def series(results: Results, op: str, sweep: str, direction: str) -> list[Series]:
    """Return the series of every provider with at least one time, in the order of the file."""
    rows = results.find(bench="scaling", op=op, sweep=sweep, direction=direction)
    found = []
    for provider in dict.fromkeys(row.provider for row in rows):
        own = sorted((row for row in rows if row.provider == provider), key=size_of)
        timed = [row for row in own if row.times]
        spent = [size_of(row) for row in own if row.skipped == "out of memory"]
        if timed:
            found.append(Series(provider, [size_of(r) for r in timed], timed, min(spent, default=None)))
    return found


def _style(provider: str) -> dict[str, Any]:
    color, marker = _STYLES.get(provider, (GREY, "x"))
    return {"color": color, "marker": marker, "markersize": 4, "linewidth": 2.2 if provider in _OURS else 1.2}


def _finish(ax: Any, **legend: Any) -> None:
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, **legend)


def _name(provider: str) -> str:
    return _LABELS.get(provider, provider)


def sweep(results: Results, over: str) -> Figure:
    """Draw time and memory of every operator against a size, with fitted exponents."""
    ops = [op for op in _SWEEPS if series(results, op, over, "both")]
    figure, grid = axes(2.7 * len(ops), 5.4, 2, len(ops))  # legible on a phone
    for column, op in enumerate(ops):
        lines = series(results, op, over, "both")
        _lines(grid[0, column], lines, lambda s: s.seconds, 1e3, "ms")
        _lines(grid[1, column], lines, lambda s: s.memory, 2**-20, "MiB beyond inputs")
        grid[0, column].set_title(f"{_SWEEPS[op].title}\n" if over == "seqlen" else f"{op}\n", fontsize=10)
        grid[1, column].set_xlabel(_SIZES[over])
    device = results.machine["device"]
    figure.suptitle(f"forward and backward, fp32; {device}. In brackets: fitted exponent", fontsize=9)
    return figure


def _lines(ax: Any, lines: list[Series], values_of: Callable[[Series], list[float]], unit: float, label: str) -> None:
    for line in lines:
        values = values_of(line)
        exponent = line.exponent(values)
        name, style = _name(line.provider) + ("" if exponent is None else f" [{exponent:.1f}]"), _style(line.provider)
        ax.plot(line.sizes, [unit * v for v in values], label=name, **style)
        if line.exhausted is not None:
            end = line.exhausted, unit * values[-1]
            ax.annotate("out of\nmemory", end, color=style["color"], fontsize=7, ha="center", va="bottom")
            ax.plot(*end, "X", color=style["color"], markersize=8)
    ax.set(xscale="log", yscale="log", ylabel=label)
    ax.set_xscale("log", base=2)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top * (top / bottom) ** 0.3)  # space for the legend: every line rises
    _finish(ax, loc="upper left")


def roofline(results: Results, dtype: str = "fp32") -> Figure:
    """Draw every forward of a dtype by its FLOP per byte and the FLOP/s that it reached."""
    figure, grid = axes(6.4, 4.2)
    ax = grid[0, 0]
    product, copy = results.machine["product_flops"][dtype], results.machine["copy_bytes"]
    intensity = np.logspace(0, 4, 100)
    ax.plot(intensity, np.minimum(intensity * copy, product) / 1e12, color="black", linewidth=1)
    ax.annotate("copy", (2, 2 * copy / 1e12), fontsize=8, rotation=30, va="bottom")
    ax.annotate("product of PyTorch's", (1e4, product / 1e12), fontsize=8, ha="right", va="bottom")
    rows = _multiplied(results, dtype)
    for provider in dict.fromkeys(row.provider for row in rows):
        own = [row for row in rows if row.provider == provider]
        places = [((row.flops or 0) / (row.bytes or 1), (row.flops or 0) / row.time / 1e12) for row in own]
        style = _style(provider) | {"linewidth": 0}
        ax.plot(*zip(*places, strict=True), label=_name(provider), alpha=0.8, **style)
    ax.set(xscale="log", yscale="log", xlabel="minimum FLOP per byte", ylabel="TFLOP/s of the customary count")
    ax.set_title(f"{' and '.join(_MULTIPLYING)}, forward, {dtype}; {results.machine['device']}", fontsize=9)
    _finish(ax)
    return figure


def _multiplied(results: Results, dtype: str) -> list[BenchRow]:
    """List the timed forward passes of the operators that multiply."""
    rows = results.find(dtype=dtype, direction="forward")
    return [r for r in rows if r.bench in _MULTIPLYING and r.flops and r.bytes and r.times]


def _beside_ours(results: Results, direction: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the time of each baseline as a multiple of the default backend's, by (op, case, dtype)."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in results.rows:
        wanted = row.bench in backends.OPS and row.direction == direction and row.provider in _BASELINES
        if wanted and row.times and (ours := results.best(row)) is not None:
            found.setdefault((row.op, row.case, row.dtype), {})[row.provider] = row.time / ours.time
    return found


def heatmap(results: Results, direction: str = "both") -> Figure:
    """Draw the time of each baseline as a multiple of the default backend's, per case."""
    ratios = _beside_ours(results, direction)
    cases, names = list(ratios), list(dict.fromkeys(name for found in ratios.values() for name in found))
    table = np.array([[found.get(name, np.nan) for name in names] for found in ratios.values()])
    figure, grid = axes(2.6 + 0.95 * len(names), 0.9 + 0.26 * len(cases))  # legible on a phone
    ax = grid[0, 0]
    ax.imshow(np.log2(table), cmap="PuOr", norm=TwoSlopeNorm(0, -2, 4), aspect="auto")
    for i, j in zip(*np.nonzero(~np.isnan(table)), strict=True):
        dark = abs(np.log2(table[i, j])) > 2
        ax.text(j, i, f"{table[i, j]:.2g}×", ha="center", va="center", fontsize=10, color="white" if dark else "black")
    ax.set_xticks(range(len(names)), [_SHORT.get(name, name) for name in names], fontsize=10)
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(cases)), [" ".join(case) for case in cases], fontsize=10)
    ax.tick_params(length=0)
    what = "forward and backward" if direction == "both" else direction
    ax.set_title(f"Speedup over each baseline, {what}", fontsize=11, loc="right")
    ax.spines[:].set_visible(False)
    return figure


def every(results: Results) -> dict[str, Figure]:
    """Return every figure for which the results have rows, by file name."""
    found: dict[str, Figure] = {}
    for over in ("seqlen", "batch", "dim"):
        if any(series(results, op, over, "both") for op in _SWEEPS):
            found[f"scaling_{over}"] = sweep(results, over)
    for dtype in results.machine["product_flops"]:
        if _multiplied(results, dtype):
            found[f"roofline_{dtype}"] = roofline(results, dtype)
    for direction in ("forward", "both"):
        if _beside_ours(results, direction):
            found[f"speedup_{direction}"] = heatmap(results, direction)
    return found
