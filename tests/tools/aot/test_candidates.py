"""The configurations that ``tune`` times: workloads are prepared on meta tensors, bad ones are left out."""

from dataclasses import replace

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from crate_kernels.cli import tune  # noqa: E402  # only where Triton compiles
from tests.tools.aot import candidates  # noqa: E402
from tests.tools.sass import kernel  # noqa: E402
from tests.tools.sass.costs import Costs  # noqa: E402


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_every_workload_is_prepared_without_a_gpu(op):
    """The shipped configuration of the first workload of each table launches kernels, or is the library's."""
    tables = {workload.table.name: workload for workload in tune.workloads([op])}
    for workload in tables.values():
        call = candidates.prepared(workload, "sm_90")
        with candidates.OnMeta():
            assert harness.launches(call, "sm_90")


def found(stack=0, serialised=0, shared=1024, issue=512.0, tensor=1024.0):
    costs = Costs(serialised=serialised)
    costs.clocks.update(issue=issue, tensor=tensor)
    bound = kernel.Bound("loop", 0, costs, 0.0, 0)
    return kernel.Bounds("k", kernel.Build("sm_90", 64, shared, 4, stack), 2, 100, 0, bound, (bound,))


# name: (bounds, the assembler's warnings, score)
SCORES = {
    "overlapping": (found(), [], (1024 + 512 / 3) / 1024),
    "issue-bound": (found(issue=2048.0), [], (2048 + 1024 / 3) / 1024),
    "spilling": (found(stack=8), [], None),
    "serialised": (found(serialised=1), [], None),
    "warned-of": (found(), ["C7515"], None),
    "too-large": (found(shared=228 * 1024), [], None),
}


@pytest.mark.parametrize(("bounds", "warnings", "score"), SCORES.values(), ids=SCORES)
def test_what_cannot_be_fast_is_left_out(bounds, warnings, score, monkeypatch):
    workload = tune.workloads(["mssa"])[0]
    monkeypatch.setattr(candidates.harness, "launches", lambda call, target: ["launch"])
    monkeypatch.setattr(candidates.report, "examine", lambda launch, target: (bounds, b"", warnings))
    value = candidates.score(None, workload, workload.table.candidates[0], "sm_90")
    assert value == (score if score is None else pytest.approx(score))


def test_the_best_come_first(monkeypatch):
    workload = tune.workloads(["mssa"])[0]
    configs = workload.table.candidates[:4]
    workload = replace(workload, table=replace(workload.table, candidates=configs))
    scores = dict(zip(map(str, configs), (2.0, None, 1.0, "refused"), strict=True))

    def score(call, workload, config, target):
        if scores[str(config)] == "refused":
            raise RuntimeError("the compiler refuses it")
        return scores[str(config)]

    monkeypatch.setattr(candidates.tune, "workloads", lambda ops: [workload])
    monkeypatch.setattr(candidates, "prepared", lambda workload, target: None)
    monkeypatch.setattr(candidates, "score", score)
    ranked = [(1.0, dict(configs[2])), (2.0, dict(configs[0]))]
    assert candidates.rank((["mssa"], 0, "sm_90")) == (str(workload), ranked, 4)
