"""``make host``: every call that it times is repeated by a plan, of kernels that Triton compiled for a GPU."""

import json

import pytest
import torch

from crate_kernels._core import plan
from crate_kernels._native import extension
from tests.tools.aot import harness
from tests.tools.plans import drivers, host

harness.needs_compiler()
pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
PLANS = {"no_grad": 1, "grad": 1, "both": 2}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, id="bf16"),
        pytest.param(
            torch.float32, id="fp32", marks=pytest.mark.exhaustive
        ),  # of which tests/ops/test_plans.py has all
    ],
)
def test_every_timed_call_is_a_plan(dtype, tmp_path):
    with drivers.idle(tmp_path):
        for name, inputs in host.calls(dtype).items():
            for kind, run in host.forms(*inputs).items():
                for _ in range(3):
                    run()
                before, _, _ = plan.counts()
                run()
                expected = 0 if name in (host.SDPA, host.SDPA + host.CAST, host.LAYERS) else PLANS[kind]
                assert plan.counts()[0] - before == expected, (name, kind)


def test_the_file_has_a_number_for_every_call(tmp_path, capsys):
    path = tmp_path / "host.json"
    before = torch.get_num_threads()
    assert host.main(["--out", str(path), "--rounds", "1"]) == 0
    torch.set_num_threads(before)
    found = json.loads(path.read_text())
    assert {"sdpa", "mssa", "tssa", "ista", "nn.MSSA"} <= found.keys()
    assert all(
        row.keys() == {"of", *host.KINDS} and min(row[kind] for kind in host.KINDS) > 0 for row in found.values()
    )
    assert {row["of"] for row in found.values()} == {host.SDPA, host.SDPA + host.CAST, host.LAYERS}
    assert [line[:22].strip() for line in capsys.readouterr().out.splitlines()[1:-1]] == list(found)
