"""The attention of ranges of a sequence to each other in Triton, against the whole operator and PyTorch's operators."""

import pytest
import torch

from tests.ops.common import DTYPES, home, kernels
from tests.ops.mssa import ranges

if "triton" not in kernels("mssa.rectangular"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = home("triton")
# The interpreter takes a second or more for a case: these reach every branch of a kernel.
CASES, PLACES = ("full", "causal-padded", "causal-dropout"), ("rows-inside", "overlapping", "no-columns")


def params(table, quick):
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.exhaustive)
        for name, case in table.items()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", params(ranges.CASES, CASES))
def test_ranges_together_are_the_whole_operator(case, dtype):
    assert ranges.over_budget(case, dtype, "triton", DEVICE) == []


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("place", params(ranges.PLACES, PLACES))
def test_any_place_is_that_of_composite(place, causal, padded):
    found, exact = ranges.alone(place, {"causal": causal}, padded, "triton", DEVICE)
    for name, expected in exact.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
