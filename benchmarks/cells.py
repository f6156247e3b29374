"""Cells of the tables: Markdown, the names of baselines, and the clocks."""

from __future__ import annotations

from crate_kernels.bench.rows import BenchRow, Results

OPERATORS = ("mssa", "tssa", "ista")  # benchmarks of one call of an operator
NAMES = {
    "sdpa": "SDPA(w, w, w)",
    "sdpa-flash": "its FlashAttention",
    "sdpa-cudnn": "its cuDNN",
    "compile": "`torch.compile` of it",
    "flex": "FlexAttention, compiled",
}


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """Render a table."""
    marks = ["---"] * len(header)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (header, marks, *lines))


# What the clocks of a row are called.
_CLOCKS = {"device": "device", "loop": "in a loop", "calls": "one by one"}
_GRAPHED_BESIDE = {
    "eager": "published, eager",
    "compile": "published, compiled",
    "compile-graphed": "published, `reduce-overhead`",
    "default": "ours",
    "default-compiled": "ours, compiled",
    "default-graphed": "ours, `reduce-overhead`",
}
DIRECTIONS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


def every_clock(results: Results) -> str:
    """Render what each provider of an operator's call takes, by every clock that the results have."""
    clocks, found = results.clocks(), [row for row in results.rows if row.bench in OPERATORS and row.times]
    names = [name for name in dict.fromkeys(row.provider for row in found) if name != "default"]
    lines = []
    for group in dict.fromkeys(row.group for row in found):
        beside = {row.provider: row for row in found if row.group == group}
        first = next(iter(beside.values()))
        cells = [_on_clocks(beside.get(name), clocks) for name in ("default", *names)]
        lines.append([_call_of(first), first.dtype, *cells])
    titles = ["`None`", *(NAMES.get(name, f"`{name}`") for name in names)]
    said = ", ".join(_CLOCKS[clock] for clock in clocks)
    return f"Microseconds: {said}.\n\n" + markdown(["call", "dtype", *titles], lines)


def graphed(results: Results) -> str:
    """Render what a model's step takes without and with CUDA graphs, by the clocks that the results have."""
    clocks, found = results.clocks(), results.find(bench="models")
    lines = []
    for group in dict.fromkeys(row.group for row in found if row.provider == "default-graphed" and row.times):
        beside = {row.provider: row for row in found if row.group == group}
        first = beside["default-graphed"]
        lines.append(
            [f"{first.case}, {first.direction}", first.dtype]
            + [_on_clocks(beside.get(name), clocks) for name in _GRAPHED_BESIDE]
        )
    if not lines:
        return "No GPU has timed a model yet.\n"
    titles = [f"{name}, us" for name in _GRAPHED_BESIDE.values()]
    return markdown(["model", "dtype", *titles], lines)


def _call_of(row: BenchRow) -> str:
    return f"`{row.op}` {row.case} ({', '.join(map(str, row.shape))}), {DIRECTIONS[row.direction]}"


def _on_clocks(row: BenchRow | None, clocks: list[str]) -> str:
    if row is None:
        return "-"
    return " / ".join(f"{1e6 * row.on(clock):.0f}" if row.samples(clock) else "-" for clock in clocks)


def graphs(results: Results) -> str:
    """Render what a replay of a call takes beside the call from Python, by the clocks that the results have."""
    clocks = [clock for clock in results.clocks() if clock != "device"]
    lines = []
    for row in results.find(provider="default"):
        if row.bench in OPERATORS and row.device_seconds:
            cells = [
                f"{1e6 * row.on(clock):.0f} ({row.on(clock) / row.time:.2f})" if row.samples(clock) else "-"
                for clock in clocks
            ]
            lines.append([_call_of(row), row.dtype, f"{1e6 * row.time:.0f}", *cells])
    return markdown(["call", "dtype", "replayed", *(_CLOCKS[clock] for clock in clocks)], lines)
