"""The workloads that ``tune`` times are prepared without a GPU, and what is shipped for one compiles."""

import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.tools.aot import harness

harness.needs_compiler()

from crate_kernels._core import backends  # noqa: E402  # only where Triton compiles
from crate_kernels._triton import table  # noqa: E402
from crate_kernels.cli import tune  # noqa: E402


class OnMeta(TorchFunctionMode):
    """Draw nothing: what would be on a GPU is a meta tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: v for k, v in (kwargs or {}).items() if not (func is torch.randn and k == "generator")}
        if func is torch.randn:
            kwargs["device"] = "meta"
        args = ["meta" if isinstance(arg, str) and arg == "cuda" else arg for arg in args]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def prepared(workload, target):
    """Return the timed call of a workload on meta tensors."""
    calls = []
    with OnMeta():
        harness.launches(lambda: calls.append(workload.make().timed), target)
    return calls[0]


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
def test_every_workload_is_prepared_without_a_gpu(op):
    """The shipped configuration of the first workload of each table launches kernels, or is the library's."""
    tables = {workload.table.name: workload for workload in tune.workloads([op], packages=("triton",))}
    for workload in tables.values():
        call = prepared(workload, "sm_90")
        with OnMeta():
            assert harness.launches(call, "sm_90")


SHIPPED = [
    pytest.param(path.stem, name, id=f"{path.stem}-{name}")
    for path in sorted(tune._RANKED.glob("*.json"))
    for name in json.loads(path.read_text())
    if not name.startswith("tssa_persistent")  # tests/ops/tssa/test_aot_persistent.py
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "name"), SHIPPED)
def test_what_is_shipped_compiles_and_fits(target, name):
    workload = next(one for one in tune.workloads([*backends.OPS], packages=("triton",)) if str(one) == name)
    call = prepared(workload, target)
    for config in json.loads((tune._RANKED / f"{target}.json").read_text())[name]:
        with table.forced(workload.table, config), OnMeta():
            launches = harness.launches(call, target)
        kernels = [harness.compile_launch(launch, target) for launch in launches]
        assert harness.over_limits(kernels, target, f"ranked {name}", True) == [], config
