"""Which derivatives a backend has; those it has not are refused, for silence would mean zeros."""

import pytest
import torch
from torch.autograd import forward_ad

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import VARIATION, backends, offsets, padding, randn, seldom

TEMP, BIAS = torch.tensor([0.8, 1.0, 1.3]), 0.1 * randn(3, 5, seed=3).float()
WEIGHT, DICTIONARY = randn(8, 8, seed=1).float() / 3, randn(8, 12, seed=2).float() / 3
PACKED = {"cu_seqlens": offsets((2, 3, 5)), "max_seqlen": 5}
MASK = padding("right", 2, 5)
FUNCTIONS = {
    "mssa": lambda w, **b: mssa(w, **b),
    "mssa-lse": lambda w, **b: mssa(w, return_lse=True, **b)[1],
    "mssa-causal-pad": lambda w, **b: mssa(w, causal=True, key_padding_mask=MASK, **b),
    "mssa-packed": lambda w, **b: mssa(w.transpose(1, 2).flatten(0, 1), **PACKED, **b),
    "mssa-relu": lambda w, **b: mssa(w, phi="relu", **b),
    "tssa": lambda w, **b: tssa(w, TEMP.to(w.dtype), **b),
    "tssa-pad": lambda w, **b: tssa(w, TEMP.to(w.dtype), key_padding_mask=MASK, **b),
    "tssa-membership": lambda w, **b: tssa(w, TEMP.to(w.dtype), return_membership=True, **b)[1],
    "tssa-causal": lambda w, **b: tssa(w, TEMP.to(w.dtype), causal=True, denom_bias=BIAS.to(w.dtype), **b),
    "ista": lambda w, **b: ista(w, WEIGHT.to(w.dtype), **b),
    "ista_overcomplete": lambda w, **b: ista_overcomplete(w, DICTIONARY.to(w.dtype), **b),
}
OFTEN = FUNCTIONS.keys() - {"mssa-lse", "mssa-causal-pad", "mssa-packed", "tssa-pad", "tssa-membership"}
REFERENCE = pytest.mark.parametrize("name", FUNCTIONS)
MISSING = "is not supported.*use backend='reference'"
# PyTorch has no batching rule for the backward of its own CPU attention, and says that a loop is slow.
pytestmark = pytest.mark.usefixtures("plain_backend")
SLOW_VMAP = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def params(reference, names=FUNCTIONS, often=OFTEN):
    """List (name, function) for every backend of this machine that takes CPU tensors; of the interpreter, ``often``."""
    pairs = [
        (name, p.values[0])
        for name in names
        for p in backends(name.partition("-")[0].removesuffix("_overcomplete"), reference)
        if p.values[1] == "cpu" and (name != "mssa-relu" or p.values[0] in ("reference", "composite"))
    ]
    # composite's mssa stays outside the op, whose autograd.Function every kernel shares.
    pairs += [(name, "plain") for name in names if name.startswith("mssa") and name != "mssa-relu"]
    return [
        pytest.param(name, backend, id=f"{name}-{backend}", marks=() if name in often else VARIATION)
        for name, backend in pairs
    ]


ALL, FUSED = (pytest.mark.parametrize(("name", "backend"), params(reference)) for reference in (True, False))
MAPPED = pytest.mark.parametrize(("name", "backend"), params(True, often=("mssa", "tssa-causal")))


def tokens(seed=0, dtype=torch.float32):
    return randn(2, 5, 3, 8, seed=seed, dtype=dtype).transpose(1, 2)


def function(name, backend):
    return lambda w: FUNCTIONS[name](w, backend=backend)


def loss(name, backend):
    return lambda w: FUNCTIONS[name](w, backend=backend).sin().sum()


def gradient(name, backend, w):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(loss(name, backend)(w), w)[0]


@ALL
def test_functional_gradients_are_those_of_autograd(name, backend):
    w, f = tokens(), loss(name, backend)
    expected = gradient(name, backend, w)
    torch.testing.assert_close(torch.func.grad(f)(w), expected)
    value, pullback = torch.func.vjp(f, w)
    torch.testing.assert_close((value, *pullback(torch.tensor(2.0))), (f(w), 2 * expected))


@MAPPED
@SLOW_VMAP
def test_jacrev_is_a_row_for_each_output(name, backend):
    w = tokens()

    def few(w):
        return function(name, backend)(w).flatten()[::97]

    leaf = w.detach().requires_grad_()
    rows = [torch.autograd.grad(out, leaf, retain_graph=True)[0] for out in few(leaf)]
    torch.testing.assert_close(torch.func.jacrev(few)(w), torch.stack(rows))
    batched = torch.autograd.grad(few(leaf), leaf, torch.eye(len(rows)), is_grads_batched=True)[0]
    torch.testing.assert_close(batched, torch.stack(rows))


@MAPPED
def test_a_gradient_of_vmap_is_that_of_a_loop(name, backend):
    f, w = loss(name, backend), torch.stack([tokens(), tokens(1)])
    mapped = torch.func.grad(lambda w: torch.func.vmap(f)(w).sum())(w)
    torch.testing.assert_close(mapped, torch.stack([gradient(name, backend, one) for one in w]))


@MAPPED
@pytest.mark.parametrize("requires_grad", seldom({"constant": False, "leaf": True}, "leaf"))
def test_vmap_equals_a_loop(name, backend, requires_grad):
    f, w = function(name, backend), torch.stack([tokens(), tokens(1)]).requires_grad_(requires_grad)
    mapped, looped = torch.func.vmap(f)(w), torch.stack([f(one) for one in w])
    torch.testing.assert_close(mapped, looped)
    if requires_grad:
        grads = [torch.autograd.grad(out.sin().sum(), w)[0] for out in (mapped, looped)]
        torch.testing.assert_close(*grads)


@ALL
def test_a_gradient_under_create_graph_has_the_same_value(name, backend):
    w = tokens().requires_grad_()
    (dw,) = torch.autograd.grad(loss(name, backend)(w), w, create_graph=True)
    torch.testing.assert_close(dw.detach(), gradient(name, backend, w))
    assert dw.requires_grad


def forward_mode(f, w):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(w, tokens(1)))).tangent


def double_backward(f, w):
    w = w.requires_grad_()
    (dw,) = torch.autograd.grad(f(w).sin().sum(), w, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), w)


def double_backward_of_a_sum(f, w):
    """The upstream gradient is constant: only what the op saved says that dw depends on w."""
    w = w.requires_grad_()
    (dw,) = torch.autograd.grad(f(w).sum(), w, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), w)


def double_backward_through_dout(f, w):
    w = w.requires_grad_()
    upstream = torch.ones_like(f(w)).requires_grad_()
    (dw,) = torch.autograd.grad(f(w), w, upstream, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), upstream)


def autograd_of_functional_gradient(f, w):
    w = w.requires_grad_()
    dw = torch.func.grad(lambda w: f(w).sin().sum())(w)
    return torch.autograd.grad(dw.square().sum(), w)


def grad_of_grad(f, w):
    dw = torch.func.grad(lambda w: f(w).sin().sum())
    return torch.func.grad(lambda w: dw(w).square().sum())(w)


REFUSED = {
    "func.jvp": (lambda f, w: torch.func.jvp(f, (w,), (w,)), "forward-mode AD"),
    "func.jacfwd": (lambda f, w: torch.func.jacfwd(f)(w), "forward-mode AD"),
    "func.hessian": (lambda f, w: torch.func.hessian(lambda w: f(w).sum())(w), "forward-mode AD"),
    "forward_ad": (forward_mode, "forward-mode AD"),
    "vmap-of-grad-of-grad": (lambda f, w: torch.func.vmap(lambda w: grad_of_grad(f, w))(w[None]), "double backward"),
    "create_graph": (double_backward, "double backward"),
    "create_graph-sum": (double_backward_of_a_sum, "double backward"),
    "create_graph-dout": (double_backward_through_dout, "double backward"),
    "autograd-of-func.grad": (autograd_of_functional_gradient, "double backward"),
    "grad-of-grad": (grad_of_grad, "double backward"),
}


@FUSED
@pytest.mark.parametrize(("attempt", "what"), seldom(REFUSED, "forward_ad", "create_graph"))
def test_other_derivatives_are_refused_with_advice(name, backend, attempt, what):
    with pytest.raises(NotImplementedError, match=f"^{name.partition('-')[0]}: {what}.*{MISSING}"):
        attempt(function(name, backend), tokens())


PARAMETERS = {
    "tssa": (lambda temp, **b: tssa(tokens(), temp, **b), TEMP),
    "tssa-causal": (lambda bias, **b: tssa(tokens(), TEMP, causal=True, denom_bias=bias, **b), BIAS),
    "ista": (lambda weight, **b: ista(tokens(), weight, **b), WEIGHT),
    "ista_overcomplete": (lambda decoder, **b: ista_overcomplete(tokens(), DICTIONARY, decoder, **b), DICTIONARY),
}


@pytest.mark.parametrize(("name", "backend"), params(reference=False, names=PARAMETERS))
def test_forward_mode_of_a_parameter_alone_is_refused(name, backend):
    f, primal = PARAMETERS[name]
    with pytest.raises(NotImplementedError, match=f"forward-mode AD {MISSING}"):
        torch.func.jvp(lambda p: f(p, backend=backend), (primal,), (primal,))


@REFERENCE
def test_forward_mode_of_the_reference(name):
    f, w, v = function(name, "reference"), tokens(dtype=torch.float64), tokens(1, torch.float64)
    tangent = torch.func.jvp(f, (w,), (v,))[1]
    step = 1e-6  # a central difference is off by eps / step = 2e-10 times what cancels, and by step^2 f'''
    torch.testing.assert_close(tangent, (f(w + step * v) - f(w - step * v)) / (2 * step), rtol=1e-6, atol=1e-6)


@REFERENCE
def test_double_backward_of_the_reference(name):
    w, v, step = tokens(dtype=torch.float64), tokens(1, torch.float64), 1e-5
    leaf = w.clone().requires_grad_()
    (dw,) = torch.autograd.grad(loss(name, "reference")(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad((dw * v).sum(), leaf)
    expected = (gradient(name, "reference", w + step * v) - gradient(name, "reference", w - step * v)) / (2 * step)
    # Differences of gradients over two steps keep about half the digits of float64.
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    twice = torch.func.grad(lambda w: (torch.func.grad(loss(name, "reference"))(w) * v).sum())(w)
    torch.testing.assert_close(twice, product)
