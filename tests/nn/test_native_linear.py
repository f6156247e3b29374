"""Products of transposed matrices by the C++ extension."""

import pytest
import torch

from crate_kernels._core import products
from crate_kernels._native import extension
from tests.nn.linear import needs_onednn

pytestmark = needs_onednn


# (m, n), which of the two is transposed, and whether the right one is turned instead of the left.
LAID_OUT = {
    "both-left-smaller": (40, 96, True, True, False),
    "both-right-smaller": (96, 40, True, True, True),
    "left": (96, 40, True, False, False),
    "right": (96, 40, False, True, False),
    "none": (96, 40, False, False, False),
}


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("m", "n", "of_left", "of_right", "turned"), LAID_OUT.values(), ids=LAID_OUT)
def test_onednn_gets_rows_on_the_left(taken, m, n, of_left, of_right, turned, with_bias):
    """PyTorch would copy a transposed matrix number by number. As its second operand oneDNN takes either."""
    if extension.PATH is None:
        pytest.skip("needs python -m crate_kernels build")

    def matrix(rows, seed, transposed):
        numbers = torch.randn(rows, 70, generator=torch.Generator().manual_seed(seed))
        return numbers.t().contiguous().t() if transposed else numbers

    left, right, bias = matrix(m, 0, of_left), matrix(n, 1, of_right), torch.ones(n) if with_bias else None
    out = products.product(left, right, bias)
    ((passed_left, passed_right, *_),) = taken
    assert passed_left.is_contiguous()
    assert passed_right is (left if turned and bias is None else right)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.nn.functional.linear(left, right, bias), rtol=1e-5, atol=1e-5)
