"""Sparse coding in Triton: the product with everything in its epilogue, and every remainder of its tiles."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, testing
from crate_kernels._core import products
from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from crate_kernels.ops.ista.triton import tables
from tests.ops.common import backends, over_tolerance, randn
from tests.ops.ista import strides
from tests.ops.ista.strides import EACH_LAYOUT

TRITON = [p for p in backends("ista") if p.values[0] == "triton"]
if not TRITON:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

EACH = pytest.mark.parametrize(("backend", "device"), TRITON)
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
LIBRARY = pytest.mark.parametrize("library", [0, 1], ids=["fused", "library"])


def going(library):
    """Make every product Triton's own, or the library's with an elementwise kernel behind it."""
    return forced(tables.PRODUCT, {**tables.PRODUCT.rows[launch.INTERPRETER][0].config, "LIBRARY": library})


EPILOGUES = {
    "plain": {},
    "scale": {"scale": -0.3},
    "base": {"base": 1, "scale": 0.2},
    "relu": {"base": 1, "threshold": 0.4},
    "soft": {"base": 1, "threshold": 0.4, "nonnegative": False},
    "gated": {"base": 1, "gated": 2, "gate": 3, "scale": -1.0},
    "cleared": {"base": 1, "gate": 3, "scale": 0.5},
    "cleared-relu": {"gate": 3, "threshold": 0.1},
}


def expected(left, right, base=None, gated=None, gate=None, scale=1.0, threshold=None, nonnegative=True):
    """Return what ``product`` does, written down in float64."""
    result = scale * left.double() @ right.double()
    if base is not None:
        result = result + base.double()
    if gated is not None:
        result = result + torch.where(gate == 0, 0.0, gated.double())
    if threshold is not None and nonnegative:
        result = (result - threshold).relu()
    elif threshold is not None:
        result = result.sign() * (result.abs() - threshold).relu()
    return torch.where(gate == 0, 0.0, result) if gate is not None and gated is None else result


@EACH
@FLOATS
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_bit_says_whether_a_number_is_not_zero(rows, dtype, backend, device):
    from crate_kernels.ops.ista.triton import bits

    gate = randn(rows, 128, dtype=dtype, device=device).relu()
    gate[0, :4] = torch.tensor([torch.nan, -0.0, torch.inf, -1.0])
    each = bits.packed(gate)[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    assert torch.equal(each.view(rows, 128), (gate != 0).to(torch.uint8))


@EACH
@FLOATS
@LIBRARY
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("options", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 33, 40), (130, 70, 96)], ids=str)
def test_the_product_is_what_it_says(shape, options, transposed, library, dtype, backend, device):
    from crate_kernels.ops.ista.triton.product import Epilogue, product

    rows, inner, columns = shape
    left = randn(rows, inner, dtype=dtype, device=device)
    right = randn(columns, inner, dtype=dtype, device=device, seed=4).t() if transposed else None
    right = randn(inner, columns, dtype=dtype, device=device, seed=4) if right is None else right
    tensors = {
        name: randn(rows, columns, dtype=dtype, device=device, seed=options[name]).relu()
        for name in ("base", "gated", "gate")
        if name in options
    }
    exact = expected(left, right, **{**options, **tensors})
    with going(library):
        actual = product(left, right, Epilogue(**{**options, **tensors}))
    assert actual.dtype == dtype
    scale = inner**0.5 + 3
    # A sum of ``inner`` products in float32, and one rounding; the library's product is rounded by itself first.
    rounded = exact.abs() + library * (options.get("scale", 1.0) * left.double() @ right.double()).abs()
    bound = 4 * torch.finfo(torch.float32).eps * scale * inner**0.5 + torch.finfo(dtype).eps * rounded
    assert ((actual.double() - exact).abs() <= bound).all()


@EACH
def test_float32_tokens_are_rounded_for_the_product_alone(backend, device):
    from crate_kernels.ops.ista.triton.product import Epilogue, product

    dtype = torch.bfloat16
    left, right = randn(40, 24, dtype=torch.float32, device=device), randn(24, 24, dtype=dtype, device=device, seed=1)
    actual = product(left, right, Epilogue(0.5, left), dtype=torch.float32)
    exact = left.double() + 0.5 * left.to(dtype).double() @ right.double()
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-5)


@EACH
@FLOATS
@pytest.mark.parametrize("dim", [1, 2, 7, 16, 17, 33, 65])
def test_every_width(dim, dtype, backend, device):
    """Tokens for both forms, and remainders of every tile."""
    for tokens in (1, dim, 2 * dim + 3):
        case = testing.Case("ista", f"triton-{tokens}x{dim}", (1, tokens, dim))
        assert over_tolerance(case, dtype, backend, device) == [], tokens


@EACH
@FLOATS
@LIBRARY
@pytest.mark.parametrize("form", tables.FORWARD_FORM.candidates, ids=["one", "two"])
@pytest.mark.parametrize("name", ["few-tokens", "many-tokens", "two-sided", "two-sided-few"])
def test_every_form_and_way_is_within_tolerance(name, form, library, dtype, backend, device):
    """Tuning may take either form of a step, and either way of a product, for any number of tokens."""
    case = next(c for c in testing.cases("ista") if c.name == name)
    with going(library), forced(tables.FORWARD_FORM, form), forced(tables.BACKWARD_FORM, form):
        assert over_tolerance(case, dtype, backend, device) == []


@EACH
@pytest.mark.parametrize("name", ["two-steps", "tied"])
def test_the_librarys_products_serve_the_overcomplete_form(name, backend, device):
    case = next(c for c in testing.cases("ista") if (c.op, c.name) == ("ista_overcomplete", name))
    with going(1):
        assert over_tolerance(case, torch.bfloat16, backend, device) == []


@EACH
@FLOATS
@EACH_LAYOUT
@pytest.mark.parametrize("function", [ista, ista_overcomplete])
def test_strides_change_nothing(function, lay_out, dtype, backend, device):
    strides.check(function, lay_out, dtype, backend, device)


@EACH
@EACH_LAYOUT
def test_strides_of_float32_weights_change_nothing_under_autocast(lay_out, backend, device):
    x = randn(40, 24, dtype=torch.float32, device=device)
    weight = lay_out(randn(24, 24, dtype=torch.float32, device=device, seed=2) * 24**-0.5)

    def run(weight):
        weight = weight.detach().requires_grad_()
        with torch.autocast(device, dtype=torch.float16):
            y = ista(x, weight, backend=backend)
        return y.detach(), *torch.autograd.grad(y.sum(), weight)

    eps = 4 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(run(weight), run(weight.contiguous()), rtol=eps, atol=eps)


@EACH
@FLOATS
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, where it interprets
@pytest.mark.parametrize("lambd", [0.0, 0.5])
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "two-sided"])
def test_what_is_not_finite_passes_through(nonnegative, lambd, dtype, backend, device):
    x = torch.tensor([[torch.nan, 1.0, -1.0], [torch.inf, 2.0, -torch.inf]], dtype=dtype, device=device)
    weight = torch.zeros(3, 3, dtype=dtype, device=device)
    y = ista(x, weight, nonnegative=nonnegative, lambd=lambd, backend=backend)
    # 0 * inf in the product makes the rest of such a row NaN, as in PyTorch.
    exact = ista(x, weight, nonnegative=nonnegative, lambd=lambd, backend="reference")
    torch.testing.assert_close(y, exact, equal_nan=True, rtol=0, atol=0)


@EACH
@FLOATS
def test_no_bit_changes_from_call_to_call(dtype, backend, device):
    x, weight = randn(70, 24, dtype=dtype, device=device), randn(24, 24, dtype=dtype, device=device, seed=1) / 5

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = ista(*leaves, backend=backend)
        return y.detach(), *torch.autograd.grad(y.sum(), leaves)

    torch.testing.assert_close(run(), run(), rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("tokens", [32, 400], ids=["few", "many"])
def test_autocast_is_no_worse_than_composite(tokens, backend, device, monkeypatch):
    monkeypatch.setattr(products, "_slow", {})  # composite multiplies in 16 bits, whatever the processor
    x, weight = (
        randn(tokens, 64, dtype=torch.float32, device=device),
        randn(64, 64, seed=1).to(device, torch.float32) / 8,
    )
    exact = ista(x.double(), weight.double(), step_size=1.0, backend="reference")
    errors = {}
    for name in (backend, "composite"):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = ista(x, weight, step_size=1.0, backend=name)
        errors[name] = (y - exact).square().mean().sqrt().item()
    assert errors[backend] <= 1.05 * errors["composite"], errors


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_float32_weights_are_not_rounded_before_the_products_of_squares(dtype, backend, device):
    """W is nearly a projection, so that W - W^T W is what two roundings of W would drown."""
    dim = 32
    basis = torch.linalg.qr(randn(dim, dim, dtype=torch.float64, device="cpu")).Q[:, : dim // 2]
    weight = (basis @ basis.t()).float().to(device) + 0.01 * randn(dim, dim, dtype=torch.float32, device=device, seed=1)
    weight.requires_grad_()
    with torch.autocast(device, dtype=dtype):
        y = ista(torch.eye(dim, device=device), weight, step_size=1.0, lambd=0.0, nonnegative=False, backend=backend)
    exact = weight.double() - weight.double().t() @ weight.double()
    eps = torch.finfo(dtype).eps
    off = 1 - torch.eye(dim, device=device)
    assert ((y - exact) * off).abs().max() <= eps * exact.abs().max()

    up = randn(dim, dim, dtype=torch.float32, device=device, seed=2).to(dtype).float()
    (dweight,) = torch.autograd.grad(y, weight, up)
    (wanted,) = torch.autograd.grad(exact, weight, (up * (y != 0)).double())
    assert (dweight - wanted).abs().max() <= 3 * eps * wanted.abs().max()
