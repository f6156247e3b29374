"""ista's CUDA kernels under the emulator, within the tolerance of every backend."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, testing
from crate_kernels._core import plan
from crate_kernels.ops.ista import cuda
from tests.ops.common import DTYPES, outputs_and_gradients, over_tolerance, randn
from tests.ops.ista import strides
from tests.ops.ista.strides import EACH_LAYOUT

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
FUNCTIONS = pytest.mark.parametrize("function", [ista, ista_overcomplete])


@EVERY_DTYPE
@pytest.mark.parametrize("case", testing.cases("ista"), ids=str)
def test_within_tolerance(case, dtype, backend):
    assert over_tolerance(case, dtype, backend, "cpu") == []


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [1, 2, 7, 8, 31, 33, 65])
def test_every_width(dim, dtype, backend):
    """Remainders of the vectors of 8 and the tiles of 32, and tokens for both forms."""
    for tokens in (1, dim, 2 * dim + 3):
        case = testing.Case("ista", f"cuda-{tokens}x{dim}", (1, tokens, dim))
        assert over_tolerance(case, dtype, backend, "cpu") == [], tokens


@pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
def test_no_order_of_threads_changes_a_bit(descending, backend, device):
    device(descending=descending)
    a = randn(70, 70, dtype=torch.float32)
    both = torch.empty_like(a)
    cuda.symmetrize(a, both)
    assert torch.equal(both, a + a.t())


OPERANDS = ("product", "base", "gated", "gate")
UPDATES = {
    "product": (("product",), {}),
    "base": (("product", "base"), {"scale": -0.3}),
    "relu": (("product", "base"), {"threshold": 0.4, "nonnegative": True}),
    "soft": (("product", "base"), {"threshold": 0.4}),
    "mask": (("gated", "gate"), {}),
    "gated": (OPERANDS, {"scale": 0.7}),
    "cleared": (("product", "base", "gate"), {}),
}


def update(operands, out, scale=1.0, threshold=0.0, nonnegative=False):
    product, base, gated, gate = map(operands.get, OPERANDS)
    cuda.update(cuda.UpdateTerms(product, base, gate, gated, scale), threshold, nonnegative, out)


def expected(operands, scale=1.0, threshold=0.0, nonnegative=False):
    v = scale * operands["product"] if "product" in operands else torch.zeros_like(operands["gated"])
    if "base" in operands:
        v = v + operands["base"]
    if "gated" in operands:
        v = v + torch.where(operands["gate"] != 0, operands["gated"], 0.0)
    v = (v - threshold).relu() if nonnegative else v.sign() * (v.abs() - threshold).relu()
    cleared = "gate" in operands and "gated" not in operands
    return torch.where(operands["gate"] != 0, v, 0.0) if cleared else v


@pytest.mark.parametrize("out_dtype", DTYPES)
@EVERY_DTYPE
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("names", "options"), UPDATES.values(), ids=UPDATES)
def test_an_update_is_what_it_says(names, options, offset, dtype, out_dtype, backend):
    """In float64, with 2067 elements: one block and a remainder of another, of a vector too."""
    numel = 2067
    operands = {name: randn(numel + 1, seed=n).to(dtype)[offset : numel + offset] for n, name in enumerate(names)}
    if "gate" in names:
        operands["gate"] = operands["gate"].relu()
    around = torch.full((numel + 9,), 7.0, dtype=out_dtype)
    out = around[offset : numel + offset]
    update(operands, out, **options)
    exact = expected({name: t.double() for name, t in operands.items()}, **options)
    bound = torch.finfo(out_dtype).eps * exact.abs() + 1e-6
    assert ((out.double() - exact).abs() <= bound).all()
    assert (around[:offset] == 7.0).all()
    assert (around[numel + offset :] == 7.0).all()


@pytest.mark.parametrize("nonnegative", [True, False])
def test_nan_stays_nan(nonnegative, backend):
    x = torch.full((3, 5), torch.nan)
    assert ista(x, torch.eye(5), nonnegative=nonnegative, backend=backend).isnan().all()


@FUNCTIONS
@EVERY_DTYPE
def test_the_same_bits_twice_and_in_any_order_of_threads(function, dtype, backend, device):
    tensors = randn(40, 24, dtype=dtype), randn(24, 24, dtype=dtype, seed=1) / 5
    results = []
    for descending in (False, False, True):
        device(descending=descending)
        results.append(outputs_and_gradients(lambda *t: function(*t, backend=backend), *tensors))
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


@FUNCTIONS
@EACH_LAYOUT
def test_strides_change_nothing(function, lay_out, backend):
    strides.check(function, lay_out, torch.float32, backend)


@EVERY_DTYPE
@pytest.mark.parametrize("lambd", [0.0, 0.5])
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "two-sided"])
def test_what_is_not_finite_passes_through(nonnegative, lambd, dtype, backend):
    x = torch.tensor([[torch.nan, 1.0, -1.0], [torch.inf, 2.0, -torch.inf]], dtype=dtype)
    y, exact = (
        ista(x, torch.zeros(3, 3, dtype=dtype), nonnegative=nonnegative, lambd=lambd, backend=name)
        for name in (backend, "reference")
    )
    torch.testing.assert_close(y, exact, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [4, 40], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_adds_the_residual_in_float32(tokens, dtype, backend):
    x, dy = (randn(tokens, 12, dtype=torch.float32, seed=seed).requires_grad_(not seed) for seed in (0, 2))
    weight = (randn(12, 12, dtype=torch.float32, seed=1) / 12**0.5).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = ista(x, weight, step_size=1e-5, lambd=0.0, backend=backend)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert y.dtype == dx.dtype == dweight.dtype == torch.float32
    # A step so short leaves relu(x) and its gradient, but for the rounding of what was added; half tokens would be off
    # by 5e-4 and more.
    torch.testing.assert_close(y, x.relu(), rtol=0, atol=1e-4)
    torch.testing.assert_close(dx, torch.where(y > 0, dy, 0.0), rtol=0, atol=1e-4)


@FUNCTIONS
def test_nothing_is_launched_for_no_tokens(function, backend):
    x, weight = torch.randn(0, 8), torch.randn(8, 8)
    y, dx, dweight = outputs_and_gradients(lambda *t: function(*t, backend=backend), x, weight)
    assert y.shape == dx.shape == (0, 8)
    assert torch.equal(dweight, torch.zeros_like(weight))


REFUSALS = {
    "elements": ({"base": torch.ones(9)}, r"base must be 8 elements on cpu, got torch\.float32 \(9,\) on cpu"),
    "strides": ({"product": torch.ones(16)[::2]}, "product must be contiguous"),
    "device": ({"gate": torch.ones(8, device="meta")}, "gate must be 8 elements on cpu, got .* on meta"),
    "dtype": ({"gate": torch.ones(8, dtype=torch.float64)}, r"gate must be 8 elements on cpu, got torch\.float64"),
    "no-gate": ({"gated": torch.ones(8)}, "gate must be given"),
}


@pytest.mark.parametrize(("operands", "message"), REFUSALS.values(), ids=REFUSALS)
def test_the_names_of_operands_are_in_refusals(operands, message, backend):
    with pytest.raises(ValueError, match=f"^ista: {message}"):
        update({"product": torch.ones(8)} | operands, torch.empty(8))


def test_a_square_is_refused_where_it_is_none(backend):
    with pytest.raises(ValueError, match=r"^ista: a must be 9 elements on cpu, got torch\.float32 \(3, 4\)"):
        cuda.symmetrize(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"^ista: both must be torch\.float32 \(3, 3\) on cpu, got torch\.bfloat16"):
        cuda.symmetrize(torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bfloat16))


@FUNCTIONS
def test_a_later_call_is_a_plan_with_launches(function, backend, repeated_calls):
    tensors = randn(40, 24, dtype=torch.bfloat16), randn(24, 24, dtype=torch.bfloat16, seed=1) / 5
    outputs_and_gradients(lambda *t: function(*t, backend=backend), *tensors)
    torch.ops.crate_kernels_C.emulated_launches()
    before, _, _ = plan.counts()
    outputs_and_gradients(lambda *t: function(*t, backend=backend), *tensors)
    assert plan.counts()[0] - before == 2
    assert repeated_calls.refused == []
    launched = torch.ops.crate_kernels_C.emulated_launches().split()
    assert "crate_kernels::ista_update_kernel" in launched
