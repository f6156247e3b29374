"""Tuning: what is timed runs, candidates are right, and the judge sees a wrong one."""

from dataclasses import replace

import pytest
import torch

from crate_kernels._triton import tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.ista.triton import tables as ista_tables
from crate_kernels.ops.mssa.triton import tables as mssa_tables
from crate_kernels.ops.tssa.triton import tables as tssa_tables
from tests.ops.common import home, kernels

if "triton" not in kernels("tssa"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from crate_kernels.ops.ista.triton import launch as ista_kernels
from crate_kernels.ops.ista.triton import tune as ista_tune
from crate_kernels.ops.mssa import timed as mssa_timed
from crate_kernels.ops.mssa import triton as mssa_kernels
from crate_kernels.ops.mssa.triton import tune as mssa_tune
from crate_kernels.ops.tssa import timed as tssa_timed
from crate_kernels.ops.tssa import triton as tssa_kernels
from crate_kernels.ops.tssa.triton import tune as tssa_tune

DEVICE = home("triton")
CALLS = {
    "mssa_forward": (mssa_tables.FORWARD, lambda t: mssa_timed.dense(mssa_kernels, 20, 16, True, False, DEVICE)),
    "mssa_backward": (mssa_tables.BACKWARD, lambda t: mssa_timed.dense(mssa_kernels, 20, 16, False, True, DEVICE)),
    "mssa_decode": (mssa_tables.DECODE, lambda t: mssa_tune._decode(20, 16, DEVICE)),
    **{table.name: (table, lambda t: tssa_tune._make(t, 2, 16, 12, DEVICE)) for table in tssa_tables.TABLES},
    "ista_product": (ista_tables.PRODUCT, lambda t: ista_tune._product(40, 32, 24, DEVICE)),
    **{
        table.name: (table, lambda t: ista_tune._form(t, 40, 32, DEVICE))
        for table in (ista_tables.FORWARD_FORM, ista_tables.BACKWARD_FORM)
    },
}


@pytest.fixture
def workload(request, monkeypatch):
    """Return the workload of a table, on a few tokens."""
    monkeypatch.setattr(mssa_timed, "_TOKENS", 12 * 20)
    monkeypatch.setattr(mssa_tune, "_DECODED", 1)
    monkeypatch.setattr(tssa_timed, "_ELEMENTS", 2 * 16 * 12)
    table, make = CALLS[request.param]
    return tune.Workload(table, LaunchRow({}, 64, 64), make(table))


@pytest.mark.parametrize("workload", CALLS, indirect=True)
def test_the_fastest_candidate_is_found_among_right_ones(workload):
    """Each of a few candidates runs and is right; the clock likes the last."""
    table = workload.table
    shipped = table.config(torch.device(DEVICE), 64, 64, False, torch.float16)
    few = table.candidates if len(table.candidates) < 4 else table.candidates[:: len(table.candidates) // 3]
    workload = replace(workload, table=replace(table, candidates=tuple(few)))
    times = iter(range(len(few) + 1, 0, -1))

    def clock(call):
        call()
        return float(next(times))

    result = tune.search(workload, shipped, clock, judge)
    assert (result.config, result.seconds, result.shipped) == (few[-1], 1.0, len(few) + 1)


def off_by_a_tenth(launcher):
    def wrong(*args, **kwargs):
        results = launcher(*args, **kwargs)
        return 1.1 * results if isinstance(results, torch.Tensor) else tuple(1.1 * t for t in results)

    return wrong


@pytest.mark.parametrize("workload", CALLS, indirect=True)
def test_a_wrong_result_is_seen(workload, monkeypatch):
    is_right = judge(workload.make())
    assert is_right()
    for module, names in (
        (mssa_kernels, ("forward", "backward", "decode")),
        (tssa_kernels, ("forward", "backward", "forward_causal", "backward_causal")),
        (ista_kernels, ("forward", "backward")),
        (ista_tune, ("product",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, off_by_a_tenth(getattr(module, name)))
    assert not is_right()
