"""The rate reduction of classes, its gradient and the loss: formulas of MCR^2."""

import math

import pytest
import torch
import torch.nn.functional as F

from crate_kernels import analysis, nn
from crate_kernels.models.redunet.rates import mcr2 as published

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def rates(z, labels, eps_squared):
    """R and Rc by their definition, from singular values: a class at a time."""

    def rate(part):
        scale = part.shape[1] / (part.shape[0] * eps_squared)
        return 0.5 * torch.log1p(scale * torch.linalg.svdvals(part) ** 2).sum()

    parts = [z[labels == label] for label in labels.unique()]
    return rate(z), sum(len(part) / len(z) * rate(part) for part in parts)


CASES = {
    "tall": (40, 5, torch.arange(40) % 3),
    "wide": (9, 16, torch.arange(9) % 3),
    "uneven": (20, 6, torch.tensor([7] + [-2] * 12 + [30] * 7)),
    "one-class": (12, 4, torch.zeros(12, dtype=torch.int32)),
    "each-its-own": (6, 4, torch.arange(6)),
    "bool": (8, 3, torch.arange(8) > 5),
}


@pytest.mark.parametrize(("samples", "dim", "labels"), CASES.values(), ids=CASES)
def test_rates_are_their_definition(samples, dim, labels):
    z = randn(samples, dim)
    expanded, compressed = rates(z, labels, 0.5)
    found = analysis.class_coding_rate(z, labels, eps_squared=0.5)
    torch.testing.assert_close(found, compressed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(analysis.coding_rate(z, eps_squared=0.5), expanded, rtol=1e-12, atol=1e-12)
    reduction = analysis.mcr2(z, labels, eps_squared=0.5)
    torch.testing.assert_close(reduction, expanded - compressed, rtol=1e-12, atol=1e-12)
    assert reduction.dtype == F64
    assert reduction >= -1e-12
    assert reduction.item() == pytest.approx(published(z, labels, 0.5)[0], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e5, 1e8])
def test_raw_features_keep_the_identity(size):
    """Two classes of equal samples: each has one singular value, beside whose square 1 is beyond float64."""
    tokens = size * torch.linalg.qr(randn(6, 6)).Q[:2]
    labels = torch.arange(8) % 2
    rate = math.log1p(6 / 0.5 * size**2)
    z = tokens[labels].requires_grad_()
    compressed = analysis.class_coding_rate(z, labels, eps_squared=0.5)
    assert compressed.item() == pytest.approx(0.5 * rate, rel=1e-11)
    reduction = analysis.mcr2(z, labels, eps_squared=0.5)
    expected = math.log1p(6 / (8 * 0.5) * 4 * size**2) - 0.5 * rate
    assert reduction.item() == pytest.approx(expected, rel=1e-10)
    (gradient,) = torch.autograd.grad(reduction, z)
    assert gradient.isfinite().all()


def derivative(z, labels, eps_squared):
    """grad R = c (I + c Z Z^T)^-1 Z, and of each class with its share of the samples."""

    def of(part):
        scale = part.shape[1] / (part.shape[0] * eps_squared)
        return scale * torch.linalg.solve(torch.eye(len(part), dtype=F64) + scale * part @ part.T, part)

    expected = of(z)
    for label in labels.unique():
        chosen = labels == label
        expected[chosen] -= chosen.double().mean() * of(z[chosen])
    return expected


REPEATED = {
    "random": lambda: randn(12, 5),
    "equal-singular-values": lambda: torch.linalg.qr(randn(12, 5)).Q,
    "orthogonal-rows": lambda: torch.eye(12, dtype=F64),
    "equal-samples": lambda: randn(1, 5).expand(12, 5),
    "zero": lambda: torch.zeros(12, 5, dtype=F64),
}


@pytest.mark.parametrize("draw", REPEATED.values(), ids=REPEATED)
def test_the_gradient_is_logdets_where_singular_values_repeat(draw):
    z, labels = draw().clone().requires_grad_(), torch.arange(12) % 3
    (gradient,) = torch.autograd.grad(analysis.mcr2(z, labels, eps_squared=0.5), z)
    torch.testing.assert_close(gradient, derivative(z.detach(), labels, 0.5), rtol=1e-10, atol=1e-12)


def test_second_derivatives():
    z, labels = randn(7, 3).requires_grad_(), torch.arange(7) % 2
    assert torch.autograd.gradgradcheck(lambda z: analysis.mcr2(z, labels, eps_squared=0.5), z)


def test_all_classes_are_factored_at_once(monkeypatch):
    sizes, qr = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda a: sizes.append(tuple(a.shape)) or qr(a))
    analysis.class_coding_rate(randn(40, 5), torch.arange(40) % 4)
    assert sizes == [(4, 15, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_the_loss_is_the_negative_reduction(dtype):
    z, labels = randn(20, 4).to(dtype).requires_grad_(), torch.arange(20) % 3
    loss = nn.MCR2Loss()(z, labels)
    wanted = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, -analysis.mcr2(z.double(), labels, eps_squared=0.5).to(wanted))
    loss.backward()
    assert z.grad.dtype == dtype
    torch.testing.assert_close(z.grad, -derivative(z.detach().double(), labels, 0.5).to(dtype))
    assert str(nn.MCR2Loss(0.1)) == "MCR2Loss(eps_squared=0.1)"


def test_training_makes_classes_orthogonal():
    """Two classes of unit features in the plane: the optimum has them at right angles."""
    z, labels = (randn(16, 2, seed=3) + torch.tensor([3.0, 0.0])).requires_grad_(), torch.arange(16) % 2
    optimizer = torch.optim.Adam([z], 0.1)
    for _ in range(100):
        optimizer.zero_grad()
        nn.MCR2Loss()(F.normalize(z, dim=-1), labels).backward()
        optimizer.step()
    features = F.normalize(z.detach(), dim=-1)
    assert (features[::2] @ features[1::2].T).abs().max() < 0.05


Z, LABELS = randn(6, 4), torch.arange(6) % 2
BAD = {
    "list": (lambda f: f([[1.0]], LABELS), TypeError, r"z must be a Tensor \(samples, dim\), got list"),
    "axes": (lambda f: f(Z[None], LABELS), ValueError, r"z must be \(samples, dim\), got \(1, 6, 4\)"),
    "empty": (lambda f: f(Z[:0], LABELS[:0]), ValueError, r"z must be \(samples, dim\), got \(0, 4\)"),
    "labels-type": (lambda f: f(Z, [0] * 6), TypeError, "labels must be a Tensor, got list"),
    "labels-float": (lambda f: f(Z, LABELS.double()), ValueError, "labels must be integers .*, got torch.float64"),
    "labels-shape": (
        lambda f: f(Z, LABELS[:5]),
        ValueError,
        r"labels must be integers .* = \(6,\), got torch.int64 \(5,\)",
    ),
    "eps": (lambda f: f(Z, LABELS, eps_squared=0), ValueError, "eps_squared must be > 0, got 0"),
    "nan": (lambda f: f(math.nan * Z, LABELS), torch.linalg.LinAlgError, "z must be finite"),
}


@pytest.mark.parametrize("name", ["class_coding_rate", "mcr2"])
@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(name, call, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        call(getattr(analysis, name))


def test_bad_distortion_of_the_loss():
    with pytest.raises(ValueError, match="MCR2Loss: eps_squared must be > 0, got 0"):
        nn.MCR2Loss(0)
