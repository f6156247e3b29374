"""Writes the tables of README.md and docs/ from benchmarks/results/.

    python -m benchmarks.tables            # rewrites what stands between the markers
    python -m benchmarks.tables --check    # exit status 1 if a page says something else

A table stands between ``<!-- table MACHINE-NAME -->`` and ``<!-- end -->``, with a machine of ``CPUS`` or "gpu".
``host`` is the table of ``make host``, from benchmarks/results/host.json; ``choices`` is what ``backend=None`` takes on
GPUs that were timed, of which the package's own files are written too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cells, choices, goals, profiled, tuning
from crate_kernels.bench import rows
from crate_kernels.bench.rows import BenchRow, Results

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/gpu.md",
    "docs/graphs.md",
    *(f"docs/performance{name}.md" for name in ("", "-zen5", "-zen4", "-intel")),
)
# Folders of results by the names that tables have for them.
CPUS = {
    "avx2": "amd-epyc-avx2-2-threads",
    "zen5": "amd-epyc-avx512-2-threads",
    "zen4": "amd-epyc-zen4-avx512-2-threads",
    "intel": "intel-xeon-avx512-2-threads",
}
_MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load() -> dict[str, Results]:
    """Read the results of every device, by the name of its folder."""
    folders = sorted(path for path in ROOT.glob("benchmarks/results/*") if path.is_dir())
    return {folder.name: rows.read_all(sorted(folder.glob("*.json"))) for folder in folders}


def _on(machine: str, results: dict[str, Results]) -> Results | None:
    """Return the results of a CPU by its name, or the first of a GPU."""
    if machine == "gpu":
        return next((r for r in results.values() if r.machine["gpu"]), None)
    return results.get(CPUS[machine])


def _ratio(results: Results, row: BenchRow, baseline: str) -> str:
    found = results.in_group(row).get(baseline)
    return "-" if found is None or not found.times else f"{found.time / row.time:.2f}"


def _ours(results: Results, bench: str, case: str, dtype: str, direction: str) -> BenchRow | None:
    beside = results.find(bench=bench, case=case, dtype=dtype, direction=direction)
    return results.best(beside[0]) if beside else None


def _pair(results: Results, bench: str, case: str, dtype: str, baseline: str, directions: tuple[str, str]) -> str:
    """Render the time of a baseline as a multiple of ours: forward / forward and backward."""
    ours = [_ours(results, bench, case, dtype, direction) for direction in directions]
    return " / ".join("-" if row is None else _ratio(results, row, baseline) for row in ours)


def _interleaved(results: Results, bench: str) -> Results:
    """Return the calls of a benchmark's operators that were timed interleaved, with cold caches."""
    ops = {row.op for row in results.find(bench=bench)}
    return Results(results.machine, [row for row in results.find(bench=rows.INTERLEAVED) if row.op in ops])


def _speed(results: Results, bench: str, baselines: list[str]) -> str:
    """Render every case of an operator: our times, and those of baselines that the results have as multiples of ours.

    Where the results have calls that were timed interleaved, with cold caches, there is a column of them per baseline.
    """
    directions = ("forward", "both")
    baselines = [b for b in baselines if any(row.times for row in results.find(bench=bench, provider=b))]
    cold = _interleaved(results, bench)
    cold_baselines = [b for b in baselines if any(row.provider == b and row.times for row in cold.rows)]
    cases = dict.fromkeys(row.case for row in results.rows if row.bench == bench)
    lines = []
    for dtype, case in itertools.product(("fp32", "bf16"), cases):
        ours = [_ours(results, bench, case, dtype, direction) for direction in directions]
        if all(row is None for row in ours):
            continue
        shape = next((f"({', '.join(map(str, row.shape))})" for row in ours if row is not None), "")
        times = " / ".join("-" if row is None else f"{1e3 * row.time:.3g}" for row in ours)
        ratios = [_pair(results, bench, case, dtype, b, directions) for b in baselines]
        ratios += [_pair(cold, rows.INTERLEAVED, case, dtype, b, directions) for b in cold_baselines]
        lines.append([f"{case} {shape}", dtype, times, *ratios])
    titles = [
        *(cells.NAMES.get(b, b) for b in baselines),
        *(f"{cells.NAMES.get(b, b)}, interleaved" for b in cold_baselines),
    ]
    return cells.markdown(["case", "dtype", "ours, ms", *titles], lines)


def _models(results: Results) -> str:
    """Render the models: times, rates and memory of a training step."""
    has = {row.provider for row in results.find(bench="models") if row.times}
    header = ["model, a step", "dtype", "ours, ms", "a second", "eager", "`torch.compile` of it", "composite"]
    more = ["both compiled"] if "default-compiled" in has else []
    found = results.find(bench="models", direction="step", provider="eager")
    lines = [line for row in found if (line := _model(results, row, has)) is not None]
    return cells.markdown([*header, *more, "step, MiB: eager / ours"], lines)


def _model(results: Results, row: BenchRow, has: set[str]) -> list[str] | None:
    """Render the model of eager's ``row``; None where ours has no time."""
    directions = ("forward", "step")
    forward, step = (_ours(results, "models", row.case, row.dtype, direction) for direction in directions)
    if forward is None or step is None:
        return None
    pairs = [_pair(results, "models", row.case, row.dtype, b, directions) for b in ("eager", "compile", "composite")]
    memory = " / ".join("-" if r.peak_bytes is None else f"{r.peak_bytes / 2**20:.0f}" for r in (row, step))
    if "default-compiled" in has:
        pairs.append(_compiled(results, row))
    times = f"{1e3 * forward.time:.4g} / {1e3 * step.time:.4g}"
    name = f"{row.case}, {step.amount:g} {step.unit}"
    return [name, row.dtype, times, f"{step.amount / step.time:.3g}", *pairs, memory]


def _models_interleaved(results: Results) -> str:
    """Render the models whose providers were timed interleaved."""
    lines, directions = [], ("forward", "step")
    for row in results.find(bench=rows.INTERLEAVED, op="model", direction="step", provider="eager"):
        ours = [_ours(results, row.bench, row.case, row.dtype, direction) for direction in directions]
        times = " / ".join("-" if found is None else f"{1e3 * found.time:.4g}" for found in ours)
        pairs = [
            _pair(results, row.bench, row.case, row.dtype, b, directions) for b in ("eager", "compile", "composite")
        ]
        lines.append([row.case, row.dtype, times, *pairs, _compiled(results, row)])
    header = ["model, interleaved", "dtype", "ours, ms", "eager", "`torch.compile` of it", "composite", "both compiled"]
    return cells.markdown(header, lines)


def _compiled(results: Results, row: BenchRow) -> str:
    """Render the time of the compiled published model as a multiple of ours, compiled too."""
    ratios = []
    for direction in ("forward", "step"):
        found = results.find(bench=row.bench, case=row.case, dtype=row.dtype, direction=direction)
        ours = next((r for r in found if r.provider == "default-compiled" and r.times), None)
        ratios.append("-" if ours is None else _ratio(results, ours, "compile"))
    return " / ".join(ratios)


def _rates(results: Results, bench: str, baseline: str) -> str:
    """Render tokens per second of decoding or generation, ours and a baseline's."""
    lines = []
    for row in results.find(bench=bench, provider=baseline):
        beside, ours = results.in_group(row), results.best(row)
        if not row.times or ours is None:
            continue
        rates = [f"{row.amount / r.time:.4g}" for r in (ours, row)]
        others = [f"{n} {_ratio(results, ours, n)}" for n in ("sdpa", "composite", "default-graphed") if n in beside]
        name = row.case if bench == "generation" else f"{row.op} {row.case}"
        lines.append([name, row.dtype, *rates, _ratio(results, ours, baseline), ", ".join(others)])
    titles = ["ours, tokens/s", f"{baseline}, tokens/s", "times", "times as long: others"]
    return cells.markdown(["case", "dtype", *titles], lines)


def _threads(results: Results) -> str:
    """Render a training step on few and many threads, and beside busy processes."""
    lines = []
    for ours in results.find(bench="threads", provider="default"):
        load = "-" if ours.load is None else f"{ours.load:.1f}"
        lines.append([ours.case, f"{1e3 * ours.time:.4g}", _ratio(results, ours, "eager"), load])
    if not lines:
        return "No results are here yet.\n"
    return cells.markdown(["crate_tiny, 4 images, a step", "ours, ms", "eager", "load average"], lines)


def _memory(results: Results) -> str:
    lines = []
    for op in ("mssa", "tssa", "ista"):
        for row in results.find(bench="scaling", sweep="seqlen", op=op, direction="both", provider="eager"):
            ours = results.best(row)
            tokens = row.shape[2] if op != "ista" else row.shape[1]
            if ours is None or tokens not in (1024, 4096, 8192, 16384):
                continue
            sizes = [max(r.peak_bytes or 0, r.resident_bytes or 0) / 2**20 for r in (row, ours)]
            eager = f"{sizes[0]:.0f}" if row.times else row.skipped
            times = f"{1e3 * row.time:.3g}" if row.times else row.skipped
            lines.append([f"{op}, {tokens} tokens", eager, f"{sizes[1]:.0f}", times, f"{1e3 * ours.time:.3g}"])
    return cells.markdown(["forward and backward, fp32", "eager, MiB", "ours, MiB", "eager, ms", "ours, ms"], lines)


def _machine(results: Results) -> str:
    facts = results.machine
    product = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {name}" for name, rate in facts["product_flops"].items())
    copy = f"{facts['copy_bytes'] / 1e9:.3g} GB/s"
    if (stream := profiled.stream_bytes(results)) > facts["copy_bytes"]:
        copy += f"; a sum of two tensors, by the profiler, {stream / 1e9:.3g} GB/s"
    return (
        f"{facts['device']} ({facts['processor']}), PyTorch {facts['torch']}, commit {facts.get('git')}.\n"
        f"In the same runs, a product of PyTorch's reached {product}, and a stream of reads and writes {copy}.\n"
    )


# The README's rows: benchmark, case, and its name with the batch of the results.
_ON_A_CPU = (
    ("mssa", "vit-197-d64", "`mssa`, CRATE-B, {batch} × 197"),
    ("mssa", "lm-1024-d64-causal", "`mssa` causal, {batch} × 1024"),
    ("tssa", "vit-196-many", "`tssa`, ToST-S, {batch} × 196"),
    ("ista", "tokens-12608", "`ista`, CRATE-S, {batch} × 197"),
    ("models", "crate_small", "CRATE-S, training step, {batch} images"),
    ("models", "crate_lm_base", "causal CRATE, training step, {batch} × 1024"),
)
_ON_A_GPU = (
    ("mssa", "vit-197-d64", "`mssa`, CRATE-B, {batch} × 197"),
    ("mssa", "lm-1024-d64-causal", "`mssa` causal, {batch} × 1024"),
    ("mssa", "long-16k-d64", "`mssa`, {batch} × 16384"),
    ("mssa", "long-16k-d128-causal", "`mssa` causal, head_dim 128, {batch} × 16384"),
    ("tssa", "vit-196", "`tssa`, ToST-S, {batch} × 196"),
    ("ista", "crate-b", "`ista`, CRATE-B, {batch} × 197"),
)
_BESIDE = {"eager": "eager", "compile": "compiled", "sdpa": "SDPA"}


def _readme(results: Results, clock: str = "") -> str:
    """Render the README's table, forward and backward: by one clock of a GPU with its memory, by dtype on a CPU."""
    gpu = results.machine["gpu"]
    views = [("", "bf16", results.by(clock))] if gpu else [(f"{d}: ", d, results) for d in ("fp32", "bf16")]
    lines = []
    for bench, case, name in _ON_A_GPU if gpu else _ON_A_CPU:
        direction = "step" if bench == "models" else "both"
        found = [cell for _, dtype, timed in views for cell in _beside(timed, bench, case, dtype, direction)]
        shapes = [row.shape for row in results.find(bench=bench, case=case) if row.shape]
        if any(cell != "-" for cell in found):
            memory = _memory_of(results, bench, case) if gpu and clock == "device" else []
            lines.append([name.format(batch=shapes[0][0]), *found, *memory])
    titles = [f"{dtype}{name}" for dtype, _, _ in views for name in ("ours, ms", *_BESIDE.values())]
    return cells.markdown(["", *titles, *(["eager, MiB", "ours, MiB"] if gpu and clock == "device" else [])], lines)


def _from_python(results: Results) -> str:
    """Render the README's table by the clock of a program: in a loop where that was timed, else one call at a time."""
    return _readme(results, "loop" if "loop" in results.clocks(direction="both") else "calls")


def _beside(results: Results, bench: str, case: str, dtype: str, direction: str) -> list[str]:
    """Render our time, and those of others as multiples of it."""
    ours = _ours(results, bench, case, dtype, direction)
    if ours is None:
        return ["-"] * (1 + len(_BESIDE))
    ratios = [_ratio(results, ours, name) for name in _BESIDE]
    time = 1e3 * ours.time
    return [
        f"{time:.0f}" if time >= 100 else f"{time:.3g}",
        *(ratio if ratio == "-" else f"{ratio}×" for ratio in ratios),
    ]


def _memory_of(results: Results, bench: str, case: str) -> list[str]:
    """Render the peak memory of eager and ours."""
    ours = _ours(results, bench, case, "bf16", "both")
    eager = None if ours is None else results.in_group(ours).get("eager")
    return ["-" if r is None or r.peak_bytes is None else f"{r.peak_bytes / 2**20:.0f}" for r in (eager, ours)]


def _generation(results: Results) -> str:
    return _rates(results, "generation", "recomputing")


def alone(results: Results) -> dict[str, float]:
    """Return the ratios of kernels that were timed alone, to what PyTorch has for them, by their names."""
    found = {f"{name}, as tuned": ratio for name, ratio in tuning.over_pytorch(results).items()}
    return found | {f"{name}, as profiled": ratio for name, ratio in profiled.over_the_best_sdpa(results).items()}


def _all_goals(results: Results) -> str:
    """Render the goals that were measured, and below the table the names of those that were not."""
    every = list(goals.lines(results, alone(results)))
    if results.machine["gpu"]:
        every.append(goals.host_line(_host_rows()))
    measured = [line for line in every if line[3]]
    table = cells.markdown(["goal", "dtype", "target", "measured", "met", "why not"], measured) if measured else ""
    left: dict[str, list[str]] = {}
    for what, _, target, found, *_ in every:
        if not found:
            left.setdefault(what, []).append(target)
    lines = "".join(f"- {what}: {', '.join(targets)}\n" for what, targets in left.items())
    return table + (f"{chr(10) if table else ''}Not measured:\n\n{lines}" if lines else "")


_GPU_MISSING = "No GPU has run these benchmarks yet, so there is no figure of one here.\n"
_TABLES: dict[str, Callable[[Results], str]] = {
    "machine": _machine,
    "speed": lambda r: _readme(r, "device"),
    "calls": _from_python,
    "mssa": lambda r: _speed(r, "mssa", ["eager", "compile", "sdpa", "flex", "composite"]),
    "tssa": lambda r: _speed(r, "tssa", ["eager", "compile", "composite"]),
    "ista": lambda r: _speed(r, "ista", ["eager", "compile", "composite"]),
    "models": _models,
    "interleaved": _models_interleaved,
    "decode": lambda r: _rates(r, "decode", "eager"),
    "generation": _generation,
    "memory": _memory,
    "threads": _threads,
    "goals": _all_goals,
    "clocks": cells.every_clock,
    "graphs": cells.graphs,
    "graphed": cells.graphed,
    "kernels": tuning.table,
}


def _host_rows() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "results" / "host.json").read_text(encoding="utf-8"))


def _host() -> str:
    """Render what a call costs the host, as ``make host`` wrote it, beside PyTorch's attention."""
    rows = _host_rows()
    kinds = [kind for kind in rows["sdpa"] if kind != "of"]
    lines = [
        [f"`{name}`", *(f"{row[kind]:.1f} ({row[kind] / rows[row['of']][kind]:.2f})" for kind in kinds)]
        for name, row in rows.items()
    ]
    return cells.markdown(["call", "without a gradient", "with one", "forward and gradient"], lines)


def render(name: str, results: dict[str, Results]) -> str:
    """Render a table by its name, such as ``zen5-speed``.

    Raises:
        KeyError: there is no such table or machine.
    """
    if name == "host":
        return _host()
    if name == "choices":
        return choices.table(results)
    machine, _, table = name.partition("-")
    found = _on(machine, results)
    if name == "gpu-goals" and found is None:
        return _all_goals(Results({"gpu": True}, []))
    if found is None:
        return _GPU_MISSING if machine == "gpu" else "No results are here yet.\n"
    return _TABLES[table](found)


def rewritten(page: str, results: dict[str, Results]) -> str:
    """Return a page with its tables rewritten from the results."""
    return _MARKED.sub(lambda found: found[1] + render(found[2], results) + found[3], page)


def main() -> int:
    """Rewrite the pages, or print those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page differs")
    args = parser.parse_args()
    results, differing = load(), 0
    texts = {ROOT / name: rewritten((ROOT / name).read_text(encoding="utf-8"), results) for name in PAGES}
    for path, new in (texts | choices.files(results)).items():
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            differing += 1
            print(f"{path.relative_to(ROOT)} {'differs from the results' if args.check else 'rewritten'}")
            if not args.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new, encoding="utf-8")
    return int(args.check and differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
