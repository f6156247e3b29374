"""Writes the tables of docs/gpu.md from figures.json: ``python -m tests.tools.aot.page``.

A table stands between ``<!-- bounds TARGET -->`` and ``<!-- end -->``.
"""

import re
from pathlib import Path

from tests.tools.aot import figures

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
_MARKED = re.compile(r"(<!-- bounds (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
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
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (_HEAD, ["---"] * len(_HEAD), *rows))


def rewritten(text):
    return _MARKED.sub(lambda match: match[1] + render(match[2]) + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
