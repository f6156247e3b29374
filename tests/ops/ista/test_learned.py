"""Step sizes, thresholds and biases that are tensors, against what users write with PyTorch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from crate_kernels import ista, ista_overcomplete

DIM, ATOMS = 8, 13


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def terms(width, kinds, dtype=torch.float64):
    """The terms of a call: a number, one learned number or a vector, all of size about 0.1."""
    shapes = {"one": (), "row": (1,), "channel": (width,)}
    made = {}
    for seed, (name, kind) in enumerate(kinds.items(), start=3):
        number = 0.1 + 0.05 * seed
        value = number + 0.2 * drawn(*shapes[kind], seed=seed) if kind in shapes else number
        made[name] = value.to(dtype).requires_grad_() if kind in shapes else value
    return made


def square(x, weight, *, step_size=0.1, lambd=0.1, bias=0.0, nonnegative=True):
    moved = x + step_size * (x @ weight - x @ weight.T @ weight) + bias
    if nonnegative:
        return F.relu(moved - step_size * lambd)
    return torch.sign(moved) * F.relu(moved.abs() - step_size * lambd)


def overcomplete(x, weight, decoder, *, step_size=0.1, lambd=0.1, bias=0.0, steps=2):
    code = torch.zeros(*x.shape[:-1], weight.shape[1], dtype=x.dtype)
    for _ in range(steps):
        code = F.relu(code + step_size * ((x - code @ weight.T) @ weight) - step_size * lambd + bias)
    return code @ decoder.T


KINDS = {
    "step": {"step_size": "one"},
    "step-per-channel": {"step_size": "channel"},
    "threshold": {"lambd": "one", "step_size": "number"},
    "threshold-per-channel": {"lambd": "channel"},
    "bias": {"bias": "channel"},
    "bias-one": {"bias": "row", "lambd": "number"},
    "all": {"step_size": "channel", "lambd": "channel", "bias": "channel"},
}
each_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)


def results(function, leaves, upstream):
    for leaf in leaves:
        leaf.grad = None
    out = function()
    (out * upstream).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("backend", [None, "composite", "reference"])
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "soft"])
@pytest.mark.parametrize("rows", [(3, 5), (2,), (1, 0)], ids=["many", "few", "none"])
@each_kind
def test_a_step_is_what_users_write(kinds, rows, nonnegative, backend):
    inputs = terms(DIM, kinds)
    x, weight = drawn(*rows, DIM, seed=1).requires_grad_(), (0.4 * drawn(DIM, DIM, seed=2)).requires_grad_()
    leaves = [x, weight, *(t for t in inputs.values() if torch.is_tensor(t))]
    options, upstream = {**inputs, "nonnegative": nonnegative}, drawn(*rows, DIM, seed=9)
    found = results(lambda: ista(x, weight, **options, backend=backend), leaves, upstream)
    assert_close(found, results(lambda: square(x, weight, **options), leaves, upstream))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "decoder"])
@each_kind
def test_overcomplete_steps_are_what_users_write(kinds, tied):
    inputs = terms(ATOMS, kinds)
    x, weight = drawn(3, 5, DIM, seed=1).requires_grad_(), (0.4 * drawn(DIM, ATOMS, seed=2)).requires_grad_()
    decoder = weight if tied else (0.4 * drawn(DIM, ATOMS, seed=7)).requires_grad_()
    leaves = [x, weight, decoder, *(t for t in inputs.values() if torch.is_tensor(t))]
    upstream = drawn(3, 5, DIM, seed=9)
    ours = results(lambda: ista_overcomplete(x, weight, None if tied else decoder, **inputs, steps=3), leaves, upstream)
    assert_close(ours, results(lambda: overcomplete(x, weight, decoder, **inputs, steps=3), leaves, upstream))


@pytest.mark.parametrize("function", [ista, ista_overcomplete])
def test_gradients_of_any_order(function):
    x, weight = drawn(3, 5, seed=1).requires_grad_(), (0.3 * drawn(5, 5, seed=2)).requires_grad_()
    step, lambd, bias = (t.detach().requires_grad_() for t in terms(5, KINDS["all"]).values())

    def call(*args):
        return function(args[0], args[1], step_size=args[2], lambd=args[3], bias=args[4])

    assert torch.autograd.gradcheck(call, (x, weight, step, lambd, bias))
    assert torch.autograd.gradgradcheck(call, (x, weight, step, lambd, bias))


def test_numbers_and_tensors_of_the_same_value_agree_with_the_kernels():
    x, weight = drawn(2, 9, DIM, dtype=torch.float32), 0.4 * drawn(DIM, DIM, dtype=torch.float32, seed=2)
    numbers, step_size = {"step_size": 0.3, "lambd": 0.2}, torch.tensor(0.3)
    assert_close(ista(x, weight, step_size=step_size, lambd=torch.full((DIM,), 0.2)), ista(x, weight, **numbers))
    wide = 0.4 * drawn(DIM, ATOMS, dtype=torch.float32, seed=2)
    assert_close(ista_overcomplete(x, wide, step_size=step_size, lambd=0.2), ista_overcomplete(x, wide, **numbers))


PRECISIONS = {
    "bf16": (torch.bfloat16, torch.bfloat16, None),
    "fp16": (torch.float16, torch.float16, None),
    "bf16-beside-fp32": (torch.bfloat16, torch.float32, None),
    "autocast": (torch.float32, torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize(("dtype", "weight_dtype", "cast"), PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("kind", ["square", "overcomplete"])
def test_half_precision_is_as_exact_as_what_users_write(kind, dtype, weight_dtype, cast):
    x, width = drawn(4, 33, 32, seed=1).to(dtype), 32 if kind == "square" else 48
    weight = (0.2 * drawn(32, width, seed=2)).to(weight_dtype)
    options = {name: t.detach().float() for name, t in terms(width, KINDS["all"]).items()}
    function = ista if kind == "square" else ista_overcomplete
    with torch.autocast("cpu", cast, enabled=cast is not None):
        out = function(x, weight, **options)
    assert out.dtype == dtype
    wide = {name: t.double() for name, t in options.items()}
    args = (x.double(), weight.double()) if kind == "square" else (x.double(), weight.double(), weight.double())
    exact = (square if kind == "square" else overcomplete)(*args, **wide)
    low = cast or dtype
    naive = {name: t.to(low) for name, t in options.items()}
    args = (x.to(low), weight.to(low)) if kind == "square" else (x.to(low), weight.to(low), weight.to(low))
    users = (square if kind == "square" else overcomplete)(*args, **naive)
    rounding = torch.finfo(low).eps * exact.abs().max()
    assert (out - exact).abs().max() <= 2 * ((users - exact).abs().max() + rounding)


@pytest.mark.parametrize("function", [ista, ista_overcomplete])
def test_one_graph_for_any_number_of_tokens(function):
    weight, options = 0.4 * drawn(DIM, DIM, seed=2), {n: t.detach() for n, t in terms(DIM, KINDS["all"]).items()}
    compiled = torch.compile(
        lambda x: function(x, weight, **options), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 11, 5):
        x = drawn(2, rows, DIM, seed=rows)
        assert_close(compiled(x), function(x, weight, **options))


X, WEIGHT = torch.ones(2, DIM), torch.ones(DIM, DIM)
BAD = {
    "step-shape": (
        lambda: ista(X, WEIGHT, step_size=torch.ones(3)),
        ValueError,
        r"ista: step_size must be \(\) or \(dim,\) = \(8,\), got \(3,\)",
    ),
    "threshold-dtype": (lambda: ista(X, WEIGHT, lambd=torch.ones(8).long()), ValueError, "ista: lambd must have a fl"),
    "bias-type": (lambda: ista(X, WEIGHT, bias=0.1), TypeError, r"bias must be a Tensor \(\) or \(dim,\) = \(8,\)"),
    "number": (lambda: ista(X, WEIGHT, lambd=-0.1, bias=torch.ones(8)), ValueError, "ista: lambd must be >= 0.0"),
    "flag": (lambda: ista(X, WEIGHT, bias=torch.ones(8), nonnegative=1), TypeError, "ista: nonnegative must be a bool"),
    "atoms": (
        lambda: ista_overcomplete(X, torch.ones(8, 5), bias=torch.ones(8)),
        ValueError,
        r"ista_overcomplete: bias must be \(\) or \(hidden,\) = \(5,\), got \(8,\)",
    ),
    "device": (
        lambda: ista(X, WEIGHT, bias=torch.ones(8, device="meta")),
        ValueError,
        "ista: bias must be on x's device cpu, got meta",
    ),
    "backend": (lambda: ista(X, WEIGHT, bias=torch.ones(8), backend="gpu"), ValueError, "backend must be None or one"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_terms(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("function", [ista, ista_overcomplete])
def test_kernels_refuse_by_name_what_they_do_not_take(function, monkeypatch):
    monkeypatch.setattr("crate_kernels.ops.ista.learned.backends.resolve", lambda *args: "cpp")
    for options in ({"step_size": torch.tensor(0.1)}, {"lambd": torch.ones(8)}, {"bias": torch.ones(8)}):
        message = f"{function.__name__}: backend='cpp' takes numbers for step_size and lambd, and no bias"
        with pytest.raises(NotImplementedError, match=message):
            function(X, WEIGHT, **options, backend="cpp")
