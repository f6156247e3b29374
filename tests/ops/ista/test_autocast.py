"""Sparse coding under autocast, and with weights and tokens of different dtypes."""

from functools import partial

import pytest
import torch

from crate_kernels import ista, ista_overcomplete
from crate_kernels._core import products
from tests.ops.common import DTYPES, backends, outputs_and_gradients, randn
from tests.ops.ista.inputs import dictionary

BACKENDS, FUSED = backends("ista"), backends("ista", reference=False)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_weight_beside_half_tokens(dtype, backend, device):
    x, weight = randn(40, 12).to(device, dtype), dictionary(12, 20).to(device, torch.float32)
    y, dx, dweight = outputs_and_gradients(lambda *t: ista(*t, backend=backend), x, weight[:, :12].contiguous())
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, torch.float32)
    out, dx, dweight, ddecoder = outputs_and_gradients(
        lambda *t: ista_overcomplete(*t, backend=backend), x, weight, 2 * weight
    )
    assert (out.dtype, dx.dtype) == (dtype, dtype)
    assert dweight.dtype == ddecoder.dtype == torch.float32


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("tokens", [4, 40], ids=["few", "many"])
def test_autocast_keeps_the_residual_stream_in_float32(tokens, backend, device):
    x, weight = randn(tokens, 12, dtype=torch.float32, device=device), dictionary(12, 12).to(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, dx, dweight = outputs_and_gradients(
            lambda *t: ista(*t, step_size=1e-4, lambd=0.0, backend=backend), x, weight
        )
    assert y.dtype == dx.dtype == dweight.dtype == torch.float32
    # A step so short leaves relu(x), but for the rounding of what was added; bf16 tokens would be off by 4e-3.
    torch.testing.assert_close(y, x.relu(), rtol=0, atol=2e-3)
    assert not torch.equal(y, y.to(torch.bfloat16).float())


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("tokens", [4, 40], ids=["few", "many"])
def test_autocast_keeps_the_gradient_of_the_residual_stream_in_float32(tokens, backend, device):
    """Without a dictionary the step is a ReLU, and its gradient is the upstream one to the bit."""
    x = randn(tokens, 12, dtype=torch.float32, device=device).requires_grad_()
    dy = randn(tokens, 12, dtype=torch.float32, device=device, seed=1)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ista(x, torch.zeros(12, 12, device=device), lambd=0.0, backend=backend)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.where(x > 0, dy, 0.0), rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("function", [ista, ista_overcomplete])
def test_autocast_leaves_half_tokens_in_their_own_dtype(function, backend, device):
    """Autocast takes bfloat16, and the tokens are float16: products in the other would lose three bits."""
    x, weight = randn(40, 12, dtype=torch.float16, device=device), dictionary(12, 12).to(device, torch.float16)
    expected = outputs_and_gradients(partial(function, backend=backend), x, weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = outputs_and_gradients(partial(function, backend=backend), x, weight)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


MIXED = {
    "bfloat16-beside-float32": (torch.float32, torch.bfloat16),
    "float16-beside-float32": (torch.float32, torch.float16),
    "float16-beside-bfloat16": (torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("dtype", "half"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("name", ["ista", "tied", "untied"])
def test_autocast_takes_a_half_dictionary_as_float32(name, dtype, half, backend, device):
    function = partial(ista if name == "ista" else ista_overcomplete, backend=backend)
    x = randn(40, 12, dtype=dtype, device=device)
    weights = [dictionary(12, 12, seed).to(device, half) for seed in ((1, 2) if name == "untied" else (1,))]
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = outputs_and_gradients(function, x, *weights)
        expected = outputs_and_gradients(lambda x, *w: function(x, *(each.float() for each in w)), x, *weights)
    assert [each.dtype for each in actual] == [dtype, dtype, *(half for _ in weights)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", [ista, ista_overcomplete])
@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.bfloat16), (torch.float32, torch.float64)], ids=["wide-x", "wide-weight"]
)
def test_autocast_leaves_float64_alone(function, dtypes):
    x, weight = (dictionary(12, 12).to(dtype) for dtype in dtypes)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"weight must be torch\.float"):
        function(x, weight)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("tokens", [4, 40], ids=["few", "many"])
def test_autocast_multiplies_in_the_autocast_dtype(tokens, backend, device, monkeypatch):
    monkeypatch.setattr(products, "_slow", {})  # a processor without its arithmetic multiplies in float32
    x, weight = randn(tokens, 12, dtype=torch.float32, device=device), dictionary(12, 12).to(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ista(x, weight, step_size=1.0, lambd=0.0, nonnegative=False, backend=backend)
        out = ista_overcomplete(x, weight, backend=backend)
    exact = ista(x.double(), weight.double(), step_size=1.0, lambd=0.0, nonnegative=False, backend="reference")
    error, eps = (y.double() - exact).abs().max().item(), torch.finfo(torch.bfloat16).eps
    assert 0.01 * eps < error < 4 * eps * exact.abs().max().item()
    assert out.dtype == torch.float32
    halved = ista_overcomplete(x.to(torch.bfloat16), weight, backend=backend)
    torch.testing.assert_close(out, halved.float(), rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), FUSED)
def test_autocast_rounds_the_matrix_of_many_tokens_once(backend, device):
    """The identity as tokens shows W - W^T W itself; rounding W first would cost bits where the two cancel."""
    x, weight = torch.eye(12, device=device), dictionary(12, 12).to(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ista(x, weight, step_size=1.0, lambd=0.0, nonnegative=False, backend=backend)
    exact = weight.double() - weight.double().T @ weight.double()
    # Half a unit in the last place of the half dtype, and a rounding of 1 + K in float32.
    tolerance = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps
    assert ((y.double() - x - exact).abs() <= tolerance).all()
