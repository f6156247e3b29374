"""Writes the tables of docs/gpu.md from figures.json: ``python -m tests.tools.aot.page``.

A table stands between ``<!-- bounds TARGET -->``, or ``<!-- choice TARGET -->``, and ``<!-- end -->``.
"""

import re
from pathlib import Path

from tests.tools.aot import choice, figures

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
_MARKED = re.compile(r"(<!-- (bounds|choice) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TENSOR_PEAK = {"sm_80": 312, "sm_90": 989, "sm_100": 2250}  # TFLOP/s of bf16, as NVIDIA states it
_PIPES = ("issue", "tensor", "mufu", "alu", "fp32", "shared")
_HEAD = (
    "kernel",
    "issue / floor",
    "first",
    "issue, tensor, MUFU, shared",
    "at most",
    "registers, blocks",
    "KB in flight",
    "waits, serialised",
    "Triton 3.6",
)


def _ceiling(one, target):
    """Return the tensor cores' rate, or the share of the bandwidth, that no pipe keeps a kernel from reaching."""
    largest = max(one[pipe] for pipe in _PIPES)
    if one["streams"]:
        return f"{min(one['memory'] / largest, 1):.0%} of bandwidth"
    return f"{_TENSOR_PEAK[target] * one['tensor'] / largest:.0f} TFLOP/s"


def _row(name, one, older, target):
    clocks = ", ".join(str(one[pipe]) for pipe in ("issue", "tensor", "mufu", "shared"))
    serialised = ", serialised" if older and older["serialised"] else ""
    return [
        name.removeprefix("cuda-"),
        f"{one['ratio']:.2f}{' of memory' if one['streams'] else ''}",
        f"{one['first']:.2f}",
        clocks,
        _ceiling(one, target),
        f"{one['registers']}, {one['blocks']}",
        f"{one['in_flight'] / 1024:.0f}",
        f"{one['waits']}, {one['serialised']}",
        f"{older['ratio']:.2f}{serialised}" if older else "CUDA C++",
    ]


def render(target):
    """Return the table of an architecture: the newest recorded Triton beside the older one, then CUDA C++."""
    every = figures.read()
    older, newer, cuda = (every.get(compiler, {}).get(target, {}) for compiler in ("3.6", "3.7", "cuda"))
    rows = [_row(name, one, older[name], target) for name, one in sorted(newer.items())]
    rows += [_row(name, one, None, target) for name, one in sorted(cuda.items())]
    return _table(_HEAD, rows)


def render_choice(target):
    """Return the table of the clocks over those of the work, by backend."""
    rows = []
    for name in choice.COMPARED:
        costs = [f"{choice.costs(name, target)[compiler]:.2f}" for compiler in ("3.7", "3.6", "cuda")]
        rows.append([name, *costs, "`cpp`" if choice.cuda_wins(name, target) else "`triton`"])
    return _table(("kernel", "Triton", "Triton 3.6", "CUDA C++", "first"), rows)


def _table(head, rows):
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *rows))


def rewritten(text):
    tables = {"bounds": render, "choice": render_choice}
    return _MARKED.sub(lambda match: match[1] + tables[match[2]](match[3]) + match[4], text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
