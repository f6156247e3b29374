"""The attention of ranges of a sequence to each other in Triton; test_rectangular_kernels.py has the named cases."""

import pytest
import torch

from tests.ops.common import DTYPES, TURNS, home, kernels
from tests.ops.mssa import ranges, test_cancelling
from tests.ops.mssa.rectangles import CASES
from tests.ops.mssa.test_rectangular_kernels import failed

if "triton" not in kernels("mssa.rectangular"):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

# The interpreter takes a second or more for a case: those here reach every branch of the kernels.
QUICK = ("full", "causal-padded", "causal-dropout", "saturated")
TOGETHER = [
    pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.exhaustive)
    for name, case in ranges.CASES.items()
]


@TURNS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TOGETHER)
def test_ranges_together_are_the_whole_operator(case, dtype):
    assert ranges.over_tolerance(case, dtype, "triton", home("triton")) == []


@pytest.mark.parametrize(
    "name", ["uneven", "no-columns", "causal-before", "causal-after", "causal-inside", "padded-rows"]
)
def test_within_tolerance(name):
    assert failed(CASES[name], torch.float32, "triton") == []


@test_cancelling.HALF
@pytest.mark.parametrize("name", ["eight", "causal"])
def test_a_delta_that_cancels(name, dtype):
    case = test_cancelling.CASES[name]
    assert test_cancelling.worst(case, dtype, "triton", home("triton"), ranges.gradient) < 1


def test_small_gradients_of_long_tokens():
    """Gradients of scores are 3e-8 here, half of fp16's smallest number."""
    found = test_cancelling.worst(test_cancelling.SMALL, torch.float16, "triton", home("triton"), ranges.gradient)
    assert found < 1
