"""What lies behind the end of a packed sequence, or in one without keys, enters no gradient and no output."""

import pytest
import torch

from crate_kernels import tssa
from tests.ops.common import FORMS, backends, randn

NUMPY = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # where Triton is interpreted
BACKENDS = [param for param in backends("tssa") if param.values[1] == "cpu"]
LOWEST = torch.finfo(torch.float32).min


def gradients(w, temp, bias, backend, lengths, longest):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    leaves = [x.clone().requires_grad_() for x in (w, temp, bias)]
    out = tssa(*leaves[:2], causal=True, denom_bias=leaves[2], cu_seqlens=bounds, max_seqlen=longest, backend=backend)
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_huge_bias_that_no_token_has(backend, device):
    """Times head_dim it is infinite."""
    w, temp = randn(4, 3, 17, dtype=torch.float32), torch.ones(3)
    bias = torch.zeros(3, 12)
    expected = gradients(w, temp, bias, backend, [4], 4)
    bias[1:, 9] = LOWEST
    found = gradients(w, temp, bias, backend, [4], 11)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_an_infinite_bias_that_no_token_has(backend, device, count):
    """A gradient of 0 times it is NaN. Nine sequences are summed in parts."""
    w, temp, bias = randn(4 * count, 3, 17, dtype=torch.float32), torch.ones(3), torch.zeros(3, 12)
    expected = gradients(w, temp, bias, backend, [4] * count, 4)
    bias[1:, 9] = -torch.inf
    found = gradients(w, temp, bias, backend, [4] * count, 11)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_an_infinite_bias_of_an_empty_batch(backend, device):
    w, temp, bias = torch.zeros(0, 3, 5, 17), torch.ones(3), torch.full((3, 5), -torch.inf)
    leaves = [x.requires_grad_() for x in (w, temp, bias)]
    out = tssa(*leaves[:2], causal=True, denom_bias=bias, backend=backend)
    _, *found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all((x == 0).all() for x in found)


@NUMPY
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_an_infinite_token_leaves_the_bias_of_other_positions(backend, device):
    w = randn(6, 3, 17, dtype=torch.float32)
    w[5] = torch.inf
    *_, dbias = gradients(w, torch.ones(3), torch.zeros(3, 5), backend, [5, 1], 5)
    assert dbias[:, 1:].isfinite().all()


@NUMPY
@FORMS
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_without_keys_an_infinite_temp_gives_zeros(backend, device, causal):
    """The logit of a token of zeros is then -inf times 0."""
    temp, keep = torch.tensor([1.0, -torch.inf, 1.0]), torch.zeros(1, 2, dtype=torch.bool)
    out, membership = tssa(
        torch.zeros(1, 3, 2, 17), temp, causal=causal, key_padding_mask=keep, return_membership=True, backend=backend
    )
    assert (out == 0).all()
    assert (membership == 0).all()


@NUMPY
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_an_infinite_temp_leaves_what_packing_pads_out(backend, device):
    w, temp, bounds = randn(5, 3, 17, dtype=torch.float32), torch.tensor([1.0, -torch.inf, 1.0]), torch.tensor([0, 5])
    out = tssa(w, temp, cu_seqlens=bounds.int(), max_seqlen=9, backend=backend)
    assert out.isfinite().all()
