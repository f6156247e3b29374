"""The attention of ranges of a sequence to each other by the CUDA kernels, under the emulator."""

import pytest
import torch

from tests.ops.mssa import ranges, test_cancelling
from tests.ops.mssa.rectangles import CASES, drawn
from tests.ops.mssa.test_rectangular_kernels import failed, results

FP16 = pytest.mark.exhaustive  # bf16 takes the same way through these kernels
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16", marks=FP16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_within_tolerance(case, dtype, backend):
    assert failed(case, dtype, backend) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ranges.CASES.values(), ids=ranges.CASES)
def test_ranges_together_are_the_whole_operator(case, dtype, backend):
    assert ranges.over_tolerance(case, dtype, backend, "cpu") == []


@pytest.mark.parametrize("name", ["causal-around", "causal-padded-dropout", "wide"])
def test_bits_are_those_of_any_order(name, backend, device):
    rows, columns, call = drawn(CASES[name], torch.bfloat16)
    expected = results(rows, columns, call, backend)
    device(descending=True)
    torch.testing.assert_close(results(rows, columns, call, backend), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", ["eight", "causal", "more"])
def test_a_delta_that_cancels(name, dtype, backend):
    assert test_cancelling.worst(test_cancelling.CASES[name], dtype, backend, gradient_of=ranges.gradient) < 1
