"""A pretended GPU and a pretended table, for the tests of the search and of its command."""

import pytest
import torch

from crate_kernels._triton import launch as _launch
from crate_kernels._triton import table as _table
from crate_kernels._triton import tune as _tune
from crate_kernels._triton.table import LaunchRow, Table
from tests.launch.common import BROKEN, CANDIDATES, CUDA, SECONDS, SHIPPED, WRONG


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend that there is a GPU, and an empty home."""
    monkeypatch.setattr(_table.Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_launch, "arch", lambda device: "sm_90")
    monkeypatch.setattr(_launch, "gpu_name", lambda device: "Fake GPU (80 GB)")
    _table.user_rows.cache_clear()
    _table._find.cache_clear()
    yield "Fake GPU (80 GB)"
    _table.user_rows.cache_clear()
    _table._find.cache_clear()


@pytest.fixture
def fake():
    table = Table("fake", {"sm_90": (LaunchRow(SHIPPED),)}, CANDIDATES)

    def block():
        return table.config(CUDA, 64, 100, False, torch.bfloat16)["BLOCK"]

    def results():
        return {"out": torch.tensor(2.0 if block() == WRONG else 1.0)}

    def make():
        return _tune.Prepared(block, results, lambda dtype: {"out": torch.ones((), dtype=dtype)}, torch.float16)

    def clock(call):
        if call() == BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return SECONDS[call()]

    return table, make, clock
