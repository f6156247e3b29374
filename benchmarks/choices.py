"""Which backend ``None`` takes on GPUs that were timed: the tables of crate_kernels/_core/measured.py.

``python -m benchmarks.tables`` writes them from benchmarks/results/. In a class of calls a backend is taken where the
usual one needed ``MIN_RATIO`` times as long on the device. A row has a time only if it was right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import cells
from crate_kernels._core import measured
from crate_kernels.bench.rows import DTYPES, BenchRow, Results

MIN_RATIO = 1.05  # less is within what runs differ by
# By the names of results, the usual one first. Composite's attention is PyTorch's own, which stands for it where it was
# not timed itself.
_BACKENDS = {"triton": "triton", "cpp": "cpp", "composite": "composite", "sdpa": "composite"}
# Sizes and length of a class, from the shape of a case.
_CLASSES = {
    "mssa": lambda batch, nheads, seqlen, head_dim: ([head_dim], seqlen),
    "tssa": lambda batch, nheads, seqlen, head_dim: ([head_dim], seqlen),
    "ista": lambda batch, seqlen, dim: ([dim], batch * seqlen),
    "ista_overcomplete": lambda batch, seqlen, dim, hidden: ([dim, hidden], batch * seqlen),
}


def classes(results: Results) -> list[dict[str, Any]]:
    """Return the classes of a GPU's calls in which another backend is taken, as a file has them.

    Cases of one class must agree: otherwise the default stays.
    """
    timed, found = results.by("device"), {}
    for row in {row.group: row for row in timed.rows if row.bench in cells.OPERATORS}.values():
        if row.direction in ("forward", "both"):
            sizes, length = _CLASSES[row.op](*row.shape)
            of = {
                "op": row.op,
                "direction": row.direction,
                "dtype": str(DTYPES[row.dtype]).removeprefix("torch."),
                "sizes": sizes,
                "length": measured.bucket(length),
                "causal": bool(row.options.get("causal")),
            }
            found.setdefault(json.dumps(of), []).append(_fastest(timed.in_group(row)))
    agreed = {of: every for of, every in found.items() if len({name for name, _ in every}) == 1}
    return [
        {**json.loads(of), "backend": every[0][0], "times": min(times for _, times in every)}
        for of, every in agreed.items()
        if every[0][0]
    ]


def _fastest(beside: Mapping[str, BenchRow]) -> tuple[str, float]:
    """Return the backend to take for a case, and the usual one's time as a multiple of its; no name to take the usual.

    The default may be neither, a backend forward and another backward: it stays where that is the fastest.
    """
    times: dict[str, float] = {}
    for name, backend in _BACKENDS.items():
        if name in beside:
            times.setdefault(backend, beside[name].time)
    if not times:
        return "", 1.0
    usual, best = next(iter(times.values())), min(times, key=times.__getitem__)
    default = beside["default"].time if "default" in beside else usual
    taken = usual >= MIN_RATIO * times[best] and MIN_RATIO * default >= times[best]
    return (best, round(usual / times[best], 3)) if taken else ("", 1.0)


def files(every: Mapping[str, Results]) -> dict[Path, str]:
    """Return the text of each GPU's table, by its path; a GPU without such classes has none."""
    found = {}
    for results in every.values():
        if results.machine["gpu"] and (rows := classes(results)):
            gpu = results.machine["device"]
            lines = ",\n  ".join(map(json.dumps, rows))
            facts = {"gpu": gpu, "git": results.machine.get("git"), "torch": results.machine["torch"]}
            head = json.dumps(facts).removeprefix("{").removesuffix("}")
            found[measured.path_of(gpu)] = f'{{\n {head},\n "classes": [\n  {lines}\n ]\n}}\n'
    return found


def table(every: Mapping[str, Results]) -> str:
    """Render the classes of every GPU."""
    lines = [
        [
            results.machine["device"],
            f"`{row['op']}`, {cells.DIRECTIONS[row['direction']]}",
            f"{row['dtype']}, {' x '.join(map(str, row['sizes']))}, {row['length'] // 2 + 1} to {row['length']} tokens",
            "causal" if row["causal"] else "full",
            f"`{row['backend']}`",
            f"{row['times']:.2f}",
        ]
        for results in every.values()
        if results.machine["gpu"]
        for row in classes(results)
    ]
    return cells.markdown(["GPU", "call", "class", "form", "`None` takes", "the usual backend's time / its"], lines)
