"""Time and memory against seqlen, batch and dim, up to sizes at which the reference implementation lacks memory."""

import pytest

from benchmarks import common
from benchmarks.common import What, grid
from crate_kernels.bench import providers
from crate_kernels.testing import SPECS

BRIEF_PROVIDERS = ("eager", "sdpa", "cpp", "triton")
LENGTHS = {"cpu": tuple(2**k for k in range(7, 15)), "cuda": tuple(2**k for k in range(7, 18))}
BATCHES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 4, 16, 64, 256)}
WIDTHS = dict.fromkeys(("cpu", "cuda"), (192, 384, 576, 768, 1152, 1536))
SWEEPS = {op: spec.sweep for op, spec in SPECS.items() if spec.sweep is not None}


def _sweep(axis, sizes):
    found = []
    for op, sweep in SWEEPS.items():
        base = sweep.base if axis == "seqlen" else sweep.image
        for device in ("cpu", "cuda"):
            for size in sizes[device]:
                brief = axis == "seqlen" and device == "cpu" and size in sweep.brief
                found.append(What(f"{axis}-{op}-{device}-{size}", base.resized(axis, size), (device,), brief))
    return found


SEQLENS = _sweep("seqlen", LENGTHS)
BATCHED = _sweep("batch", BATCHES)
WIDE = _sweep("dim", WIDTHS)
PROVIDERS = ("eager", "compile", "sdpa", "composite", "cpp", "triton")


def _grid(subjects, directions):
    """Parametrise over the providers that each operator has."""
    every = grid(subjects, directions, PROVIDERS, ["fp32"])
    known = {op: [provider.name for provider in providers.of(op)] for op in SWEEPS}
    kept = [p for p in every.args[1] if p.values[3] in known[p.values[0].subject.case.op]]
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
