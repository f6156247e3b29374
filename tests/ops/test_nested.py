"""Nested tensors beside the tokens are refused by name, of a first call and of one that a plan would repeat."""

import pytest
import torch

import crate_kernels as ck
from tests.ops.common import randn

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
W, X = randn(2, 3, 5, 16, dtype=torch.float32), randn(2, 5, 16, dtype=torch.float32)
TEMP, WEIGHT, MASK = torch.ones(3), torch.eye(16), torch.ones(2, 5, dtype=torch.bool)
CALLS = {
    "mssa-key_padding_mask": (lambda t: ck.mssa(W, key_padding_mask=t), MASK),
    "tssa-key_padding_mask": (lambda t: ck.tssa(W, TEMP, key_padding_mask=t), MASK),
    "tssa-temp": (lambda t: ck.tssa(W, t), TEMP[:, None]),
    "tssa-denom_bias": (lambda t: ck.tssa(W, TEMP, causal=True, denom_bias=t), torch.ones(3, 5)),
    "ista-weight": (lambda t: ck.ista(X, t), WEIGHT),
    "ista_overcomplete-weight": (lambda t: ck.ista_overcomplete(X, t), WEIGHT),
    "ista_overcomplete-decoder": (lambda t: ck.ista_overcomplete(X, WEIGHT, t), WEIGHT),
}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.parametrize("calls", [0, 4], ids=["first", "repeated"])
@pytest.mark.parametrize("name", CALLS)
def test_a_nested_tensor_is_refused_by_name(name, calls, layout):
    call, value = CALLS[name]
    for _ in range(calls):
        call(value)
    op, _, argument = name.partition("-")
    for nested in (torch.nested.nested_tensor(list(value), layout=layout), torch.nested.nested_tensor([value] * 2)):
        with pytest.raises(NotImplementedError, match=f"{op}: {argument} must not be a nested tensor"):
            call(nested)
