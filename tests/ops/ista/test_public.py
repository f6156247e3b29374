"""Sparse coding: loops = reference = every backend, and what the named cases do not show."""

from functools import partial

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, testing
from crate_kernels._core import backends as _backend
from tests.ops.common import (
    EXACT,
    TURNS,
    backends,
    cases_by_dtype,
    interpreted,
    outputs_and_gradients,
    over_tolerance,
    randn,
)
from tests.ops.ista.inputs import DIM, dictionary
from tests.ops.ista.naive import ista_loop, ista_overcomplete_loop

BACKENDS, FUSED = backends("ista"), backends("ista", reference=False)
HIDDEN = 10
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
@pytest.mark.parametrize(("case", "dtype"), cases_by_dtype("ista"))
def test_within_tolerance(case, dtype, backend, device):
    assert over_tolerance(case, dtype, backend, device) == []


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
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32], ids=["half", "float"])
@pytest.mark.parametrize("dim", [4, 272], ids=["many", "few"])
def test_sums_over_tokens_that_float16_holds_only_scaled(dim, weight_dtype, backend, device):
    tokens, dim = (80, min(dim, 88)) if interpreted(backend, device) else (256, dim)
    x, dout = (torch.full((tokens, dim), value).to(device).half() for value in (16.0, 60.0))
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


# Of any size that its product with the step leaves in range: (step_size, lambd).
THRESHOLDS = {
    "beyond-half": (0.1, 1e6),
    "near-half": (1e-5, 5e4),
    "tiny-step": (1e-30, 1.03e30),
    "no-step": (0.0, 1e6),
    "beyond-float": (1e-39, 1.0033e39),
    "all-zero": (1e30, 1e30),
}


@TURNS
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
