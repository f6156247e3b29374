"""Time and memory against seqlen, batch and dim, to where the published form runs out of memory."""

import pytest

from benchmarks import common
from benchmarks.common import What, grid
from crate_kernels.testing import Case, Timed

BRIEF_PROVIDERS = ("eager", "sdpa", "cpp", "triton")
# The scores of 4096 tokens would take all providers more than a minute; bench_mssa.py times them once.
BRIEF = {"mssa": (256, 1024), "tssa": (256, 1024, 4096), "ista": (256, 1024, 4096)}
LENGTHS = {"cpu": tuple(2**k for k in range(7, 15)), "cuda": tuple(2**k for k in range(7, 18))}
BASES = {
    "mssa": Case("mssa", "base", (1, 8, 0, 64)),
    "tssa": Case("tssa", "base", (1, 12, 0, 64)),
    "ista": Case("ista", "base", (1, 0, 768)),
}
BATCHES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 4, 16, 64, 256)}
WIDTHS = (192, 384, 576, 768, 1152, 1536)
IMAGES = {
    "mssa": Case("mssa", "base", (8, 12, 197, 64)),
    "tssa": Case("tssa", "base", (8, 8, 196, 48)),
    "ista": Case("ista", "base", (8, 197, 576)),
}


def _sweep(bases, sizes_of, resize, sweep):
    found = []
    for op, case in bases.items():
        for device in ("cpu", "cuda"):
            for size in sizes_of(device):
                timed = resize(Timed(case, "", (device,)), size)
                brief = sweep == "seqlen" and device == "cpu" and size in BRIEF[op]
                found.append(What(f"{sweep}-{op}-{device}-{size}", timed, (device,), brief))
    return found


SEQLENS = _sweep(BASES, LENGTHS.get, Timed.with_seqlen, "seqlen")
BATCHED = _sweep(IMAGES, BATCHES.get, Timed.with_batch, "batch")
WIDE = _sweep(IMAGES, lambda _: WIDTHS, Timed.with_dim, "dim")
PROVIDERS = ("eager", "compile", "sdpa", "composite", "cpp", "triton")


def _grid(subjects, directions):
    """Parametrise; a provider that an operator does not have is no case of its."""
    every = grid(subjects, directions, PROVIDERS, ["fp32"])
    kept = [p for p in every.args[1] if p.values[3] != "sdpa" or p.values[0].subject.case.op == "mssa"]
    return pytest.mark.parametrize(every.args[0], kept)


@_grid(SEQLENS, ["forward", "both"])
def test_seqlen(timed, what, dtype, direction, provider):
    common.operator(timed, "scaling", what, dtype, direction, provider, "seqlen")


@_grid(BATCHED, ["both"])
def test_batch(timed, what, dtype, direction, provider):
    common.operator(timed, "scaling", what, dtype, direction, provider, "batch")


@_grid(WIDE, ["both"])
def test_dim(timed, what, dtype, direction, provider):
    common.operator(timed, "scaling", what, dtype, direction, provider, "dim")
