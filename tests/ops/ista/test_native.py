"""Sparse coding by the C++ extension: levels, tails, strides, threads, and the products it chooses among."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels import ista, ista_overcomplete, testing
from crate_kernels._core import products
from crate_kernels._native import extension
from crate_kernels.ops.ista import composite, op, reference
from crate_kernels.ops.ista.call import ISTACall
from tests.ops.common import LEVELS, NEEDS_EXTENSION, failures, randn
from tests.ops.ista import strides
from tests.ops.ista.strides import EACH_LAYOUT

if extension.PATH is not None:
    from crate_kernels.ops.ista import native

pytestmark = NEEDS_EXTENSION

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


# Of the two libraries of float32 products, and of 16-bit arithmetic, what a processor may have.
PROCESSORS = {"blas": (False, ()), "onednn": (True, ()), "float32-alone": (False, (torch.bfloat16, torch.float16))}


@pytest.fixture(params=PROCESSORS.values(), ids=PROCESSORS)
def processor(request, monkeypatch):
    """Take the products of another processor, of any size."""
    onednn, slow = request.param
    if onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("needs a PyTorch with oneDNN")
    monkeypatch.setattr(products, "_library", torch.ops.mkldnn._linear_pointwise.default if onednn else None)
    monkeypatch.setattr(products, "_slow", dict.fromkeys(slow, products.Fp32Fallback(1, 1, 1)))
    monkeypatch.setattr(products, "_MIN_WORK", 1)


@EVERY_DTYPE
@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_within_tolerance(name, dtype, level):
    level(name)
    assert [(str(case), m) for case in testing.cases("ista") for m in failures(case, dtype)] == []


@pytest.mark.parametrize("name", LEVELS)
def test_every_width(name, level):
    """Tiles of 16, vectors of 4 to 16 and segments of 256 elements, each with every kind of remainder."""
    level(name)
    for dim in (1, 2, 3, 7, 15, 16, 17, 31, 33, 47, 63, 65):
        for tokens in (1, dim, 4 * dim + 3):
            case = testing.Case("ista", f"{tokens}x{dim}", (1, tokens, dim))
            for dtype in DTYPES.values():
                assert failures(case, dtype) == [], (tokens, dim, dtype)


# (tokens, dim) of one call: groups of 6, 4, 2 and 1 rows, of 1, 2 and 4 vectors, and parts of 128 terms.
FEW = ((1, 16), (2, 48), (3, 64), (5, 80), (6, 32), (13, 96), (23, 272), (64, 144))


@pytest.fixture
def few_alone(monkeypatch):
    """Fail where products of the library are taken."""
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(native, name, lambda *_: pytest.fail("not one call"))


@pytest.mark.parametrize("name", LEVELS)
def test_a_few_tokens_are_one_call(name, level, few_alone):
    level(name)
    for tokens, dim in FEW:
        for options in ({}, {"step_size": 0.3, "lambd": 0.0}, {"step_size": 0.0}):
            case = testing.Case("ista", "few", (1, tokens, dim), options)
            assert failures(case, torch.float32) == [], (tokens, dim, options)


@pytest.mark.parametrize("lambd", [0.1, 0.0], ids=["shrunk", "as it is"])
def test_a_few_tokens_are_shrunk_from_both_sides(lambd, few_alone):
    x, weight, dout = (randn(*shape, seed=seed) for seed, shape in enumerate([(9, 32), (32, 32), (9, 32)]))
    found = {}
    for backend, dtype in (("cpp", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight * 32**-0.5)]
        out = ista(*leaves, lambd=lambd, nonnegative=False, backend=backend)
        found[backend] = [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]
    for ours, exact in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_of_a_few_tokens_one_gradient_alone(wanted, few_alone):
    x, weight, dout = randn(9, 32).float(), randn(32, 32, seed=1).float() * 0.2, randn(9, 32, seed=2).float()
    both = {"x": x.requires_grad_(), "weight": weight.requires_grad_()}
    expected = torch.autograd.grad(ista(x, weight, backend="cpp"), both[wanted], dout)
    for name, leaf in both.items():
        leaf.requires_grad_(name == wanted)
    assert torch.equal(*torch.autograd.grad(ista(x, weight, backend="cpp"), both[wanted], dout), *expected)


def test_a_few_tokens_give_the_same_bits_on_any_number_of_threads(threads, few_alone):
    x, weight, dout = randn(64, 272).float(), randn(272, 272, seed=1).float() * 0.06, randn(64, 272, seed=2).float()
    found = []
    for number in (1, 2):
        threads(number)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = ista(*leaves, backend="cpp")
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (8, 384), (64, 128)])
def test_a_few_tokens_in_bfloat16_are_rounded_once(tokens, dim, few_alone):
    x, weight = randn(tokens, dim, dtype=torch.bfloat16), randn(dim, dim, dtype=torch.bfloat16, seed=1) * dim**-0.5
    exact = ista(x.float(), weight.float(), backend="cpp")
    assert torch.equal(ista(x, weight, backend="cpp"), exact.bfloat16())


@pytest.mark.parametrize("backend", ["cpp", None], ids=["cpp", "none"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (8, 512), (64, 128)])
def test_gradients_of_a_few_tokens_in_bfloat16_are_rounded_once(tokens, dim, backend, few_alone):
    x, weight = randn(tokens, dim, dtype=torch.bfloat16), randn(dim, dim, dtype=torch.bfloat16, seed=1) * dim**-0.5
    call, dy = ISTACall(0.1, 0.1, True, torch.bfloat16), randn(tokens, dim, dtype=torch.bfloat16, seed=2)
    y = reference.forward(x, weight, call)
    found = op.ista_bwd(dy, x, weight, y, True, True, *call, backend or "auto")
    wide = (t.float() for t in (dy, x, weight, y))
    exact = op.ista_bwd(*wide, True, True, *call._replace(compute=torch.float32), "cpp")
    assert [torch.equal(one, other.bfloat16()) for one, other in zip(found, exact, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("tokens", "dim", "dtype", "first"),
    [
        (8, 64, torch.bfloat16, "cpp"),
        (197, 384, torch.bfloat16, "cpp"),
        (2048, 384, torch.bfloat16, "composite"),
        (2048, 384, torch.float32, "cpp"),
    ],
)
def test_a_backward_in_bfloat16_is_that_of_its_size(tokens, dim, dtype, first, monkeypatch):
    asked = []
    monkeypatch.setattr(products, "fast_dtype", lambda dtype, rows: asked.append(rows) or dtype)
    x, weight = torch.empty(1, tokens, dim, dtype=dtype), torch.empty(dim, dim, dtype=dtype)
    order = op._backward_order(("cpp", "composite"), x, x, weight, x, True, True, ISTACall(0.1, 0.1, True, dtype))
    assert order[0] == first
    assert asked == [tokens]
    assert op._backward_order(("composite",), x, x, weight, x, True, True, None) == ("composite",)


@pytest.mark.parametrize(("small", "runs"), [(0, "composite"), (1 << 30, "cpp")], ids=["composite", "cpp"])
def test_flops_of_a_backward_in_bfloat16_are_those_of_who_runs_it(small, runs, monkeypatch):
    monkeypatch.setattr(products, "fast_dtype", lambda dtype, rows: dtype)
    monkeypatch.setattr(op, "_SMALL", small)
    x, weight = randn(5, 12, dtype=torch.bfloat16).requires_grad_(), randn(12, 12, dtype=torch.bfloat16, seed=1)
    for kernel, one in ((composite, True), (native, False)):
        monkeypatch.setattr(type(kernel.engine(x)), "one_product_back", lambda *_, one=one: one)
    y = ista(x, weight)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    product, square = 2 * 5 * 12 * 12, 2 * 12**3
    assert counter.get_total_flops() == {"composite": product + square, "cpp": 2 * product}[runs]


def test_not_a_number_stays_one_among_a_few_tokens(few_alone):
    x, weight = randn(9, 32).float(), randn(32, 32, seed=1).float() * 0.2
    x[4, 7] = torch.nan
    for nonnegative in (True, False):
        out = ista(x, weight, nonnegative=nonnegative, backend="cpp")
        assert torch.equal(out.isnan(), ista(x, weight, nonnegative=nonnegative, backend="reference").isnan())


@EVERY_DTYPE
@pytest.mark.parametrize("backend", ["cpp", "composite"])
@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("dim", [96, 240])
def test_the_products_of_every_processor(dim, tokens, backend, dtype, processor):
    assert failures(testing.Case("ista", "library", (1, tokens, dim)), dtype, backend) == []


@EVERY_DTYPE
@pytest.mark.parametrize("backend", ["cpp", "composite"])
def test_the_overcomplete_products_of_every_processor(backend, dtype, processor):
    case = testing.Case("ista_overcomplete", "library", (1, 70, 24, 96), {"steps": 2})
    assert failures(case, dtype, backend) == []


WIDE = (257, 272, 273, 288, 300, 513)  # wide enough for panels, around multiples of bands, panels and segments


@EVERY_DTYPE
@pytest.mark.parametrize("dim", WIDE)
def test_panels_of_the_symmetric_product(dim, dtype):
    weight = randn(dim, dim, dtype=torch.float32) * dim**-0.5
    exact = weight.double() - weight.double().T @ weight.double()
    actual, eager = native._engine(torch.device("cpu")).gram(weight, dtype), (weight - weight.T @ weight).to(dtype)
    assert actual.dtype == dtype
    measured = testing.measure({"out": actual}, {"out": eager}, {"out": exact}, dtype)
    assert [m for m in measured if not m.passed] == []


@pytest.mark.parametrize("name", LEVELS)
def test_of_the_symmetric_product_the_upper_half_is_read(name, level):
    """Whole bands of 16 rows and columns on the diagonal, and nothing below them."""
    level(name)
    for dim in (1, 15, 16, 17, 255, 256, *WIDE):
        a, b, band = randn(dim, dim).float(), randn(dim, dim, seed=1).float(), torch.arange(dim) // 16
        below = band[:, None] > band
        out = torch.empty_like(a)
        torch.ops.crate_kernels_C.ista_subtract_symmetric(a, b.masked_fill(below, torch.nan), out)
        torch.testing.assert_close(out, a - torch.where(below, b.T, b), rtol=0, atol=0)


@pytest.mark.parametrize("name", LEVELS)
def test_a_matrix_is_transposed(name, level, threads):
    """Whole bands of 16 rows and blocks of 4 to 16 columns, what is left of either, and several tasks."""
    level(name)
    threads(2)
    for rows, columns in itertools.product((0, 1, 15, 16, 17, 33, 700), (0, 1, 3, 16, 21, 64, 130)):
        matrix, out = randn(rows, columns).float(), torch.full((columns, rows), torch.nan)
        torch.ops.crate_kernels_C.transpose(matrix, out)
        assert torch.equal(out, matrix.T), (rows, columns)


@pytest.mark.parametrize("special", ["", "tied"])
def test_a_wide_dictionary(special, processor):
    """Enough for oneDNN's product; in half precision no token that wide is clear of every threshold."""
    case = testing.Case("ista_overcomplete", "wide", (1, 200, 150, 600), {"steps": 3}, special=special)
    assert failures(case, torch.float32) == []


def test_no_gradient_is_made_for_the_codes():
    """Autograd would fill as many zeros as there are codes, which are saved, and take no gradient."""
    x, weight = randn(3, 33, 24, dtype=torch.float32).requires_grad_(), randn(24, 96, dtype=torch.float32)
    out = ista_overcomplete(x, weight, backend="cpp")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        out.backward(torch.ones_like(out))
    written = [event.input_shapes[0] for event in profile.events() if event.name in ("aten::zero_", "aten::fill_")]
    assert [2, 99, 96] not in written


@EVERY_DTYPE
@EACH_LAYOUT
@pytest.mark.parametrize(("function", "dim"), [(ista, 24), (ista, 32), (ista_overcomplete, 24)])
def test_strides_change_nothing(function, dim, lay_out, dtype):
    strides.check(function, lay_out, dtype, "cpp", dim=dim)


@EACH_LAYOUT
def test_a_wide_dictionary_of_any_strides(lay_out):
    """Panels of the symmetric product are cut from it, and C++ reads it by rows."""
    x, weight = (randn(rows, 272, dtype=torch.float32, seed=rows) for rows in (320, 272))
    weight = lay_out(weight * 272**-0.5)
    expected = ista(x, weight.contiguous(), backend="cpp")
    torch.testing.assert_close(ista(x, weight, backend="cpp"), expected)


def test_two_threads_share_the_work(threads):
    case = testing.Case("ista", "threads", (2, 400, 200))  # several tasks of every kernel
    inputs = testing.make_inputs(case, torch.float32)
    for count in (1, 2, 5):
        threads(count)
        assert failures(case, torch.float32) == [], count
        torch.testing.assert_close(testing.run(case, inputs, "cpp"), testing.run(case, inputs, "cpp"), rtol=0, atol=0)


@EVERY_DTYPE
@pytest.mark.parametrize("lambd", [0.0, 0.5])
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "two-sided"])
def test_what_is_not_finite_passes_through(nonnegative, lambd, dtype):
    x = torch.tensor([[torch.nan, 1.0, -1.0], [torch.inf, 2.0, -torch.inf]], dtype=dtype)
    y = ista(x, torch.zeros(3, 3, dtype=dtype), nonnegative=nonnegative, lambd=lambd, backend="cpp")
    # 0 * inf in the product makes the rest of such a row NaN, as in PyTorch.
    exact = ista(x, torch.zeros(3, 3, dtype=dtype), nonnegative=nonnegative, lambd=lambd, backend="reference")
    torch.testing.assert_close(y, exact, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [32, 400], ids=["few", "many"])
def test_autocast_is_no_worse_than_composite(tokens, compute):
    x, weight = randn(tokens, 64, dtype=torch.float32), randn(64, 64, dtype=torch.float32, seed=1) / 8
    exact = ista(x.double(), weight.double(), step_size=1.0, backend="reference")
    errors = {}
    for backend in ("cpp", "composite"):
        with torch.autocast("cpu", dtype=compute):
            y = ista(x, weight, step_size=1.0, backend=backend)
        errors[backend] = (y - exact).square().mean().sqrt().item()
    assert errors["cpp"] <= 1.05 * errors["composite"], errors


def test_arguments_that_python_should_have_caught():
    ops, t = torch.ops.crate_kernels_C, torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match=r"ista: product must be 16 elements on cpu, got float32 \(12,\) on cpu"):
        ops.ista_update(torch.zeros(12), None, None, 1.0, 0.0, False, t)
    with pytest.raises(RuntimeError, match="out must be contiguous"):
        ops.ista_update(t, None, None, 1.0, 0.0, False, torch.zeros(4, 8)[:, ::2])
    with pytest.raises(RuntimeError, match=r"a must be float32 \(4, 4\) on cpu, got float16 \(4, 4\)"):
        ops.ista_add_transposed(t.half(), t)
    with pytest.raises(RuntimeError, match="a must be contiguous"):
        ops.transpose(torch.zeros(4, 8)[:, ::2], t)
    with pytest.raises(RuntimeError, match=r"out must be float32 \(4, 3\) on cpu, got float32 \(4, 4\)"):
        ops.transpose(torch.zeros(3, 4), t)


@pytest.mark.parametrize("tokens", [300, 600])
def test_gradients_summed_by_every_library(tokens, processor):
    """Of 256 columns; from 257 tokens on the sum over tokens is oneDNN's, if it is work enough: as of 600 it is."""
    assert failures(testing.Case("ista", "library", (1, tokens, 256)), torch.float32) == []
    assert failures(testing.Case("ista_overcomplete", "library", (1, tokens, 128, 512)), torch.float32) == []


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a PyTorch with oneDNN")
def test_a_part_of_a_matrix_is_copied_for_onednn(monkeypatch):
    """oneDNN takes a hundred times as long for a weight whose rows are further apart than they are long."""
    seen, original = [], torch.ops.mkldnn._linear_pointwise.default

    def library(left, right, *rest):
        seen.append(right)
        return original(left, right, *rest)

    monkeypatch.setattr(products, "_library", library)
    monkeypatch.setattr(products, "_MIN_WORK", 1)
    x, wide = torch.randn(300, 240), torch.randn(240, 480)
    for weight in (wide[:, :240], wide[:, ::2], wide[:, :240].t()):
        torch.testing.assert_close(native._engine(torch.device("cpu")).mm(x, weight), x @ weight, rtol=1e-4, atol=1e-3)
    assert len(seen) == 3
    assert all(right.is_contiguous() or right.t().is_contiguous() for right in seen)
