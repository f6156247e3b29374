"""What ``tune`` times of the kernels for Hopper GPUs: nothing where no GPU has them."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
from crate_kernels.ops.mssa.cuda import tune as mssa
from crate_kernels.ops.tssa.cuda import persistent, walking
from crate_kernels.ops.tssa.cuda import tune as tssa

WORKLOADS = {
    "mssa": (mssa, (heads.FORWARD, heads.BACKWARD, long_rows.FORWARD, long_rows.BACKWARD, long_pairs.BACKWARD), 32),
    "tssa": (tssa, (persistent.FORWARD, persistent.BACKWARD, walking.FORWARD, walking.BACKWARD), 22),
}


@pytest.mark.parametrize(("kernels", "tables", "count"), WORKLOADS.values(), ids=WORKLOADS)
def test_only_a_gpu_that_has_them_times_them(kernels, tables, count, monkeypatch):
    reasons = ["this PyTorch has no CUDA"]
    monkeypatch.setattr(kernels.launch.backends, "unavailable_reason", lambda *args: reasons[0])
    assert kernels.workloads() == []
    reasons[0] = None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # PyTorch for CUDA on a machine without a GPU
    assert kernels.workloads() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in ((80, 0), (90, count), (100, 0)):
        monkeypatch.setattr(
            kernels.launch, "gpu", lambda device, c=capability: SimpleNamespace(capability=c, shared_limit=227 * 1024)
        )
        every = kernels.workloads()
        assert len({str(one) for one in every}) == len(every) == expected
        assert {one.table.name for one in every} == ({table.name for table in tables} if expected else set())
