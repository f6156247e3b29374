"""Memory that a kernel asks for at its launch: from PyTorch, and in a plan a separate allocation."""

import pytest
import torch

from crate_kernels import ista
from crate_kernels._core import plan
from crate_kernels._native import extension
from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from tests.tools.aot import harness

harness.needs_compiler()

from triton.runtime import _allocation  # noqa: E402  # only where Triton compiles

from crate_kernels.ops.ista.triton import tables  # noqa: E402
from tests.tools.plans import drivers  # noqa: E402


def test_triton_allocates_by_pytorch_meanwhile_and_by_the_users_function_after(monkeypatch):
    def theirs(size, alignment, stream):
        raise AssertionError

    token = _allocation._allocator.set(theirs)
    try:
        asked = []
        with launch.scratch(torch.device("cuda", 3)):
            monkeypatch.setattr(torch, "empty", lambda *sizes, **options: asked.append((sizes, options)))
            _allocation._allocator.get()(512, 128, 7)
        assert asked == [((512,), {"dtype": torch.uint8, "device": torch.device("cuda", 3)})]
        with pytest.raises(ZeroDivisionError), launch.scratch(torch.device("cuda", 3)):
            _ = 1 / 0
        assert _allocation._allocator.get() is theirs
    finally:
        _allocation._allocator.reset(token)


@pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
def test_a_plan_gives_every_program_its_memory(tmp_path, monkeypatch):
    described, describe = [], launch.describe
    x, weight = torch.randn(300, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16) / 8
    with drivers.idle(tmp_path), forced(tables.PRODUCT, tables.STREAM):
        monkeypatch.setattr(launch, "describe", lambda *args: described.append(describe(*args)) or described[-1])
        for _ in range(3):
            ista(x, weight)
        before, _, _ = plan.counts()
        ista(x, weight)
        assert plan.counts()[0] == before + 1
    (one,) = described
    programs = one.grid[0]
    assert programs == 3  # of 128 rows
    *_, own, profiler = one.parameters
    assert (own.numel(), own.dtype, profiler) == (programs * one.owner.metadata.global_scratch_size, torch.uint8, None)
    assert own.numel() >= programs * 4 * 128  # descriptors
