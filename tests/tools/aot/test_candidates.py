"""The configurations that ``tune`` times: workloads are prepared on meta tensors, bad ones are left out."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from crate_kernels._core import backends  # noqa: E402  # only where Triton compiles
from crate_kernels._triton import table  # noqa: E402
from crate_kernels.cli import tune  # noqa: E402
from tests.tools.aot import candidates  # noqa: E402
from tests.tools.sass import kernel  # noqa: E402
from tests.tools.sass.costs import Costs  # noqa: E402


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_every_workload_is_prepared_without_a_gpu(op):
    """The shipped configuration of the first workload of each table launches kernels, or is the library's."""
    tables = {workload.table.name: workload for workload in tune.workloads([op], packages=("triton",))}
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
    monkeypatch.setattr(candidates.report, "examine", lambda launch, target: (bounds, b"", warnings))
    value = candidates.score(["launch"], "sm_90")
    assert value == (score if score is None else pytest.approx(score))


def test_of_several_launches_the_one_of_the_most_products_counts(monkeypatch):
    """A kernel that reads each row once is no reason to have the other issue more."""
    monkeypatch.setattr(candidates.report, "examine", lambda one, target: (one, b"", []))
    main, small = found(issue=2048.0), found(issue=300.0, tensor=64.0)
    assert candidates.score([small, main], "sm_90") == candidates.score([main], "sm_90")
    assert candidates.score([small, found(issue=900.0)], "sm_90") < candidates.score([main], "sm_90")


def test_the_best_come_first(monkeypatch):
    workload = tune.workloads(["mssa"], packages=("triton",))[0]
    configs = workload.table.candidates[:5]
    workload = replace(workload, table=replace(workload.table, candidates=configs))
    # The last launches what the first does.
    scores = dict(zip(map(str, configs), (2.0, None, 1.0, "refused", 2.0), strict=True))

    def launches(call, target):
        value = scores[str(table._forced[workload.table.name])]
        return [SimpleNamespace(function=test_the_best_come_first, arguments={"value": value}, options={})]

    def score(launches, target):
        value = launches[0].arguments["value"]
        if value == "refused":
            raise RuntimeError("the compiler refuses it")
        return value

    monkeypatch.setattr(candidates.tune, "workloads", lambda ops, packages: [workload])
    monkeypatch.setattr(candidates, "prepared", lambda workload, target: None)
    monkeypatch.setattr(candidates.harness, "launches", launches)
    monkeypatch.setattr(candidates, "score", score)
    ranked = [(1.0, dict(configs[2])), (2.0, dict(configs[0]))]
    assert candidates.rank((["mssa"], 0, "sm_90")) == (str(workload), ranked, 5)


@pytest.mark.parametrize("path", sorted(tune._RANKED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_shipped_is_what_the_tool_writes(path):
    chosen = json.loads(path.read_text())
    assert path.read_text() == candidates.text(chosen)
    assert json.loads(candidates.text({**chosen, "none left": []})) == {**chosen, "none left": []}


SHIPPED = [
    pytest.param(path.stem, name, id=f"{path.stem}-{name}")
    for path in sorted(tune._RANKED.glob("*.json"))
    for name in json.loads(path.read_text())
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "name"), SHIPPED)
def test_what_is_shipped_compiles_and_fits(target, name):
    workload = next(one for one in tune.workloads([*backends.OPS], packages=("triton",)) if str(one) == name)
    call, wrong = candidates.prepared(workload, target), []
    for config in json.loads((tune._RANKED / f"{target}.json").read_text())[name]:
        with table.forced(workload.table, config), candidates.OnMeta():
            launches = harness.launches(call, target)
        if candidates.score(launches, target) is None:
            wrong.append(config)
    assert wrong == []
