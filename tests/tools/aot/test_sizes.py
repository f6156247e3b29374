"""Small and odd sizes: kernels of extreme ones compile, and the calls of ``sizes.py`` launch every kernel."""

import ast
from pathlib import Path

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

import crate_kernels  # noqa: E402  # only where Triton compiles
from tests.ops.ista import aot as ista  # noqa: E402
from tests.ops.mssa import aot as mssa  # noqa: E402
from tests.ops.tssa import aot as tssa  # noqa: E402
from tests.tools.aot import sizes  # noqa: E402

SINGLE, HALF = torch.float32, torch.bfloat16
# name: (call, target, the steps of it that are compiled, all by default)
EXTREMES = {
    "tssa.causal-1x2": (tssa.causal(33, 1, 2, SINGLE), "sm_90", ("DMEMBERS", "DW")),
    "tssa.causal-1x16-half": (tssa.causal(33, 1, 16, HALF), "sm_90", ("DMEMBERS",)),
    "tssa.causal-3x4-padded": (tssa.causal(17, 3, 4, SINGLE, padded=True), "sm_90", ("DMEMBERS",)),
    "tssa.causal-2x16": (tssa.causal(33, 2, 16, SINGLE), "gfx942", ("DMEMBERS",)),
    "tssa.causal-1x1": (tssa.causal(1, 1, 1, SINGLE), "sm_90", ()),
    "tssa.full-1x16-dropout": (tssa.full(2, 1, 16, HALF, dropout_p=0.1), "sm_90", ("DW",)),
    "tssa.full-1x128-dropout": (tssa.full(1, 1, 128, SINGLE, dropout_p=0.1), "sm_90", ("DW",)),
    "tssa.decode-64x256": (tssa.decode(3, 64, 256, SINGLE), "sm_90", ()),
    "tssa.full": (tssa.full(1, 1, 1, HALF), "sm_90", ()),
    "tssa.decode": (tssa.decode(1, 1, 1, HALF), "sm_90", ()),
    "mssa.forward": (mssa.forward(1, 1, HALF), "sm_90", ()),
    "mssa.backward": (mssa.backward(3, 1, HALF, causal=True), "sm_90", ()),
    "mssa.decode": (mssa.decode(1, 1, HALF), "sm_90", ()),
    "ista.step": (ista.step(1, 1, HALF), "sm_90", ()),
}


@pytest.mark.parametrize(("call", "target", "steps"), EXTREMES.values(), ids=EXTREMES)
def test_kernels_of_extreme_sizes_compile(call, target, steps):
    found = harness.launches(call, target)
    chosen = [launch for launch in found if not steps or any(launch.arguments.get(step) is True for step in steps)]
    assert len(chosen) >= max(len(steps), 1)
    assert harness.misfits(chosen, target) == []


def test_the_sizes_launch_every_kernel():
    """Kernels are the compiled functions that are named so; none is launched at no size."""
    package = Path(crate_kernels.__file__).parent
    trees = [ast.parse(path.read_text()) for path in package.glob("ops/**/*.py") if "triton" in str(path)]
    written = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }
    found = [launch for _, call in sizes.calls() for launch in harness.launches(call, "sm_90")]
    assert {launch.function.__name__ for launch in found} == written


def test_every_draw_has_all_pairs_of_sizes_and_calls_of_its_own():
    first, both = ([name for name, _ in sizes.calls(draws) if name.startswith("tssa.causal")] for draws in (1, 2))
    pairs = {name.partition("seqlen")[0] for name in first}
    assert len(pairs) == len(first) == len(sizes.HEADS) * len(sizes.CHANNELS)
    assert both[: len(first)] == first
    assert len(set(both)) > 1.9 * len(first)


def test_more_shared_memory_than_there_is_is_a_misfit(monkeypatch):
    launches = harness.launches(tssa.decode(1, 2, 4, SINGLE), "sm_90")
    monkeypatch.setitem(harness.SHARED_LIMIT, "sm_90", -1)
    assert "bytes of shared memory" in harness.misfits(launches, "sm_90")[0]
