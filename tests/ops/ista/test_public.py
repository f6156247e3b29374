"""Sparse coding: loops = reference = every backend, and what the named cases do not show."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels import ista, ista_overcomplete, testing
from crate_kernels._core import backends as _backend
from crate_kernels._core import products
from crate_kernels.ops.ista.call import ISTACall
from tests.ops.common import DTYPES, EXACT, backends, outputs_and_gradients, over_budget, randn
from tests.ops.ista.naive import ista_loop, ista_overcomplete_loop

BACKENDS, FUSED = backends("ista"), backends("ista", reference=False)
DIM, HIDDEN = 6, 10
LOOPS = {
    "relu": {"step_size": 0.1, "lambd": 0.1},
    "large-step": {"step_size": 0.7, "lambd": 0.4},
    "no-threshold": {"step_size": 0.2, "lambd": 0.0},
    "no-step": {"step_size": 0.0, "lambd": 0.3},
    "two-sided": {"step_size": 0.3, "lambd": 1.5, "nonnegative": False},
}
OVERCOMPLETE = {
    "one-step": {"step_size": 0.1, "lambd": 0.1, "steps": 1},
    "two-steps": {"step_size": 0.3, "lambd": 0.2, "steps": 2},
    "four-steps": {"step_size": 0.2, "lambd": 0.5, "steps": 4},
}
# On either side of every choice by the number of tokens: forward at dim, backward at 2/3 dim.
SHAPES = {"one": (DIM,), "few": (3, DIM), "between": (5, DIM), "many": (2, 1, 8, DIM)}
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def dictionary(dim=DIM, hidden=DIM, seed=1):
    return randn(dim, hidden, seed=seed) * dim**-0.5


def overcomplete_inputs(tied, *shape):
    return [randn(*shape), dictionary(hidden=HIDDEN)] + ([] if tied else [dictionary(hidden=HIDDEN, seed=2)])


@pytest.mark.parametrize("backend", ["reference", "composite"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_float64_is_the_loop(options, shape, backend):
    tensors = randn(*shape), dictionary()
    expected = outputs_and_gradients(lambda x, weight: ista_loop(x, weight, **options), *tensors)
    actual = outputs_and_gradients(lambda x, weight: ista(x, weight, **options, backend=backend), *tensors)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "composite"])
@TIED
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OVERCOMPLETE.values(), ids=OVERCOMPLETE)
def test_overcomplete_float64_is_the_loop(options, shape, tied, backend):
    tensors = overcomplete_inputs(tied, *shape)
    expected = outputs_and_gradients(lambda *t: ista_overcomplete_loop(*t, **options), *tensors)
    actual = outputs_and_gradients(lambda *t: ista_overcomplete(*t, **options, backend=backend), *tensors)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("shape", [(0,), (5, 0), (2, 3, 0), (0, 0)])
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_tokens_without_channels(backend, device, shape):
    x, square, wide = (randn(*sizes, dtype=torch.float32, device=device) for sizes in (shape, (0, 0), (0, 4)))
    for function, weight in ((ista, square), (ista_overcomplete, wide)):
        results = outputs_and_gradients(partial(function, backend=backend), x, weight)
        assert [t.shape for t in results] == [x.shape, x.shape, weight.shape]


@pytest.mark.parametrize("name", ["relu", "two-sided"])
def test_gradcheck(name):
    tensors = randn(4, 3).requires_grad_(), dictionary(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: ista(*t, **LOOPS[name], backend="reference"), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: ista(*t, **LOOPS[name], backend="reference"), tensors)


@TIED
def test_overcomplete_gradcheck(tied):
    tensors = [t.requires_grad_() for t in overcomplete_inputs(tied, 2, DIM)]

    def function(*tensors):
        return ista_overcomplete(*tensors, **OVERCOMPLETE["two-steps"], backend="reference")

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", testing.cases("ista"), ids=str)
def test_within_budget(case, dtype, backend, device):
    assert over_budget(case, dtype, backend, device) == []


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("backend", "device"), FUSED)
def test_few_tokens_are_as_exact_as_the_published_step(backend, device, tokens):
    single = {"dtype": torch.float32, "device": device}
    x, weight = randn(20, tokens, 256, **single) * 0.1, randn(20, 256, 256, **single) * 0.02

    def error(backend):  # the median of 20 draws: a library may add term by term to the threshold, at its size
        made = [ista(*pair, lambd=0.5, backend=backend) for pair in zip(x, weight, strict=True)]
        exact = [ista(*pair, lambd=0.5, backend="reference") for pair in zip(x.double(), weight.double(), strict=True)]
        return (torch.stack(made).double() - torch.stack(exact)).abs().amax((1, 2)).median()

    assert error(backend) <= 2 * error("reference")


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "two-sided"])
@pytest.mark.parametrize("chunk", [5, 9, 13, 40])
def test_few_tokens_at_a_time_equal_many(chunk, nonnegative, backend, device):
    """dim = 12: chunks of 5 take two products both ways, of 9 in the forward only, of 13 one product."""
    tensors = randn(40, 12).to(device, torch.float32), dictionary(12, 12).to(device, torch.float32)
    options = {"step_size": 0.3, "lambd": 0.4, "nonnegative": nonnegative}

    def chunked(x, weight):
        return torch.cat([ista(part, weight, **options, backend=backend) for part in x.split(chunk)])

    exact = outputs_and_gradients(lambda *t: ista(*t, **options, backend="reference"), *(t.double() for t in tensors))
    eager = outputs_and_gradients(lambda *t: ista(*t, **options, backend="reference"), *tensors)
    named = [
        dict(zip(("y", "dx", "dweight"), results, strict=True))
        for results in (outputs_and_gradients(chunked, *tensors), eager, exact)
    ]
    assert [m for m in testing.measure(*named, torch.float32) if not m.passed] == []


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("tokens", [4, 40])
def test_the_weight_is_read_anew_every_call(tokens, backend, device):
    """A write through ``.data`` moves no version counter: a kept W - W^T W would be stale and nobody could tell."""
    x, weight = randn(tokens, 12).to(device, torch.float32), dictionary(12, 12).to(device, torch.float32)
    before, version = ista(x, weight, backend=backend), weight._version
    weight.data.mul_(3.0)
    after = ista(x, weight, backend=backend)
    assert weight._version == version
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, ista(x, weight, backend="reference"))


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
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=["half", "float"])
@pytest.mark.parametrize("dim", [4, 272], ids=["many", "few"])
def test_sums_over_tokens_that_float16_holds_only_scaled(dim, weight_dtype, backend, device):
    x, dout = torch.full((256, dim), 16.0).to(device).half(), torch.full((256, dim), 60.0).to(device).half()
    weight = (0.3 * torch.eye(dim)).to(device, weight_dtype).requires_grad_()
    (dweight,) = torch.autograd.grad(ista(x, weight, backend=backend), weight, dout)
    exact = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(ista(x.double(), exact, backend="reference"), exact, dout.double())
    torch.testing.assert_close(dweight.double(), expected, rtol=2**-8, atol=0.0)
    options = {"steps": 2, "lambd": 0.5, "backend": backend}
    tied = (0.3 * torch.eye(dim, dim + 1)).to(device, weight_dtype).requires_grad_()
    decoder = torch.full_like(tied, 2.0**-9).detach()
    (dweight,) = torch.autograd.grad(ista_overcomplete(x, tied, decoder, **options), tied, dout)
    assert bool(dweight.isfinite().all())


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
    budget = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps
    assert ((y.double() - x - exact).abs() <= budget).all()


@pytest.mark.parametrize(("backend", "device"), FUSED)
def test_only_the_gradients_asked_for_are_computed(backend, device, monkeypatch):
    kernel, asked = _backend.kernel("ista", backend), []
    backward = kernel.backward

    def asked_backward(dy, x, weight, y, need_dx, need_dweight, call):
        asked.append((need_dx, need_dweight))
        return backward(dy, x, weight, y, need_dx, need_dweight, call)

    monkeypatch.setattr(kernel, "backward", asked_backward)
    for shape in SHAPES.values():
        x, weight = randn(*shape).to(device, torch.float32), dictionary().to(device, torch.float32)
        both = outputs_and_gradients(lambda *t: ista(*t, backend=backend), x, weight)
        only_x = outputs_and_gradients(lambda x, weight=weight: ista(x, weight, backend=backend), x)
        only_weight = outputs_and_gradients(lambda weight, x=x: ista(x, weight, backend=backend), weight)
        torch.testing.assert_close([*only_x, only_weight[1]], both)
    assert asked == [(True, True), (True, False), (False, True)] * len(SHAPES)


def flops(call):
    """Return what PyTorch counts of a call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


class Products(TorchDispatchMode):
    """Adds up the FLOP of the matrix products that run; PyTorch's counter leaves out those in place."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", ["xw", "x", "w"])
@pytest.mark.parametrize("tokens", [1, 4, 9, 11, 40])
def test_flops_are_those_of_the_products_that_run(tokens, asked):
    """By shapes alone one token counted as dim of them, in the form that its backend does not take."""
    x, weight = randn(tokens, 12).requires_grad_("x" in asked), dictionary(12, 12).requires_grad_("w" in asked)
    counted, y = flops(lambda: ista(x, weight, backend="composite"))
    counted_back, _ = flops(lambda: y.sum().backward())
    kernel, call = _backend.kernel("ista", "composite"), ISTACall(0.1, 0.1, True, x.dtype)
    plain = x.detach(), weight.detach()
    with Products() as forward:
        kernel.forward(*plain, call)
    with Products() as backward:
        kernel.backward(torch.ones_like(y), *plain, y.detach(), "x" in asked, "w" in asked, call)
    assert (counted, counted_back) == (forward.flops, backward.flops)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("one", [True, False], ids=["one-product", "two-products"])
def test_flops_follow_the_form_that_a_backend_takes(one, backend, device, monkeypatch):
    x, weight = randn(5, 12).to(device, torch.float32), dictionary(12, 12).to(device, torch.float32)
    engine = type(_backend.kernel("ista", backend, device).engine(x))
    monkeypatch.setattr(engine, "one_product", lambda *_: one)
    monkeypatch.setattr(engine, "one_product_back", lambda *_: one)
    counted, y = flops(lambda: ista(x, weight.requires_grad_(), backend=backend))
    product, square = 2 * 5 * 12 * 12, 2 * 12**3
    assert counted == (product + square if one else 2 * product)
    assert flops(lambda: y.sum().backward())[0] == (product + square if one else 4 * product)


def test_flops_of_the_overcomplete_form():
    tokens, dim, hidden, steps = 4, 12, 20, 3
    x = randn(tokens, dim).requires_grad_()
    product, weight = 2 * tokens * dim * hidden, dictionary(dim, hidden).requires_grad_()
    counted, out = flops(lambda: ista_overcomplete(x, weight, steps=steps, backend="composite"))
    # z_0 = 0 spares the first step one of its two products, and decoding is one more.
    assert counted == 2 * steps * product
    assert flops(lambda: out.sum().backward())[0] == 4 * steps * product


# Of any size that its product with the step leaves in range: (step_size, lambd).
THRESHOLDS = {
    "beyond-half": (0.1, 1e6),
    "near-half": (1e-5, 5e4),
    "tiny-step": (1e-30, 1.03e30),
    "no-step": (0.0, 1e6),
    "beyond-float": (1e-39, 1.0033e39),
    "all-zero": (1e30, 1e30),
}


@pytest.mark.parametrize("form", ["relu", "two-sided", "overcomplete"])
@pytest.mark.parametrize(("step_size", "lambd"), THRESHOLDS.values(), ids=THRESHOLDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("backend", "device"), FUSED)
def test_a_threshold_of_any_size(form, step_size, lambd, dtype, backend, device):
    if form == "two-sided" and step_size * lambd > torch.finfo(dtype).max:
        pytest.skip(f"needs a dtype that holds the threshold: {step_size * lambd:g} is beyond {dtype}")
    for tokens in (2, 40):
        inputs = [t.to(device, dtype) for t in (randn(tokens, DIM), dictionary(hidden=DIM))]
        options = {"step_size": step_size, "lambd": lambd}
        if form != "overcomplete":
            options["nonnegative"] = form == "relu"
        op = ista_overcomplete if form == "overcomplete" else ista
        found = outputs_and_gradients(lambda *t, op=op, o=options: op(*t, **o, backend=backend), *inputs)
        exact = outputs_and_gradients(
            lambda *t, op=op, o=options: op(*t, **o, backend="reference"), *(t.double() for t in inputs)
        )
        for x, right in zip(found, exact, strict=True):
            bound = 8 * torch.finfo(dtype).eps * right.abs().max() + torch.finfo(dtype).smallest_normal
            assert (x.double() - right).abs().max() <= bound


# Tokens, in units of which a threshold is so large that it may not be added to a product.
UNITS = {"fp16": (torch.float16, 2.0**6), "bf16": (torch.bfloat16, 2.0**118), "fp32": (torch.float32, 2.0**118)}


@pytest.mark.parametrize(("dtype", "unit"), UNITS.values(), ids=UNITS)
@pytest.mark.parametrize(("backend", "device"), FUSED)
def test_a_large_threshold_leaves_codes_of_larger_tokens(dtype, unit, backend, device):
    generator = torch.Generator().manual_seed(5)
    for tokens in (2, 20):
        # Whole numbers, none of which is at the threshold.
        x, weight = (torch.randint(-n, n + 1, (m, DIM), generator=generator) for n, m in ((8, tokens), (1, DIM)))
        inputs = [t.to(device, dtype) for t in (x * unit, weight)]
        options = {"step_size": 0.125, "lambd": 4.5 * unit, "steps": 1}
        found = outputs_and_gradients(lambda *t, o=options: ista_overcomplete(*t, **o, backend=backend), *inputs)
        exact = outputs_and_gradients(
            lambda *t, o=options: ista_overcomplete(*t, **o, backend="reference"), *(t.double() for t in inputs)
        )
        assert (exact[0] != 0).any()
        for one, right in zip(found, exact, strict=True):
            assert (one.double() - right).abs().max() <= 8 * torch.finfo(dtype).eps * right.abs().max()
