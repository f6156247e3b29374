"""ReduNet's layers and rates against the published loops."""

import math
from itertools import product

import pytest
import torch

from crate_kernels.models.redunet import mcr2
from tests.models.redunets import EXACT, OPTIONS, SHAPES, double, layer_for, samples


def naive_operator(v, eps):
    """Invert frequency by frequency, in loops, as published: ``c (I + c V V^H)^-1``."""
    m, channels, *size = v.shape
    c, out = channels / (m * eps), torch.empty(channels, channels, *size, dtype=v.dtype)
    for place in product(*(range(n) for n in size)):
        gram = torch.eye(channels, dtype=v.dtype)
        for sample in v:
            z = sample[(slice(None), *place)]
            gram = gram + c * torch.outer(z, z.conj())
        out[(slice(None), slice(None), *place)] = c * torch.linalg.inv(gram)
    return out


def naive_apply(operator, sample):
    """One sample through one operator, frequency by frequency."""
    out = torch.empty_like(sample)
    for place in product(*(range(n) for n in sample.shape[1:])):
        at = (slice(None), *place)
        out[at] = operator[(slice(None), slice(None), *place)] @ sample[at]
    return out


def naive_step(v, y, eta, eps, lmbda):
    """One layer built from samples and applied to them; returns output, operators, gam and estimates."""
    e = naive_operator(v, eps)
    cs = [naive_operator(v[y == j], eps) for j in range(3)]
    gam = [(y == j).sum().item() / len(y) for j in range(3)]
    out, estimates = torch.empty_like(v), []
    for i, sample in enumerate(v):
        moved = [naive_apply(c, sample) for c in cs]
        weights = torch.tensor([-lmbda * max(z.abs().square().sum().sqrt().item(), 1e-8) for z in moved]).double()
        p = weights.softmax(0).tolist()
        z = sample + eta * (naive_apply(e, sample) - sum(g * q * c for g, q, c in zip(gam, p, moved, strict=True)))
        out[i] = z / z.abs().square().sum().sqrt()
        estimates.append(max(range(3), key=p.__getitem__))
    return out, e, cs, gam, estimates


@pytest.mark.parametrize("kind", SHAPES)
def test_a_layer_is_the_published_loop(kind):
    x, y = samples(SHAPES[kind])
    layer = double(layer_for(kind))
    v = layer.preprocess(x)
    unit = x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))
    axes = tuple(range(2, x.dim()))
    torch.testing.assert_close(v, torch.fft.fftn(unit, dim=axes, norm="ortho") if axes else unit, **EXACT)
    layer.init(v, y)
    out, estimates = layer(v, return_y=True)
    wanted, e, cs, gam, classes = naive_step(v, y, *OPTIONS)
    torch.testing.assert_close(layer.E.weight.data, e, **EXACT)
    for module, c in zip(layer.Cs, cs, strict=True):
        torch.testing.assert_close(module.weight.data, c, **EXACT)
    torch.testing.assert_close(layer.gam.data, torch.tensor(gam).double())
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-7, atol=1e-7)  # gam is stored in the layer's float
    assert estimates.tolist() == classes
    back = layer.postprocess(3 * out.detach())
    assert not back.is_complex()
    torch.testing.assert_close(back.flatten(1).norm(dim=1), torch.ones(len(x)).double())


@pytest.mark.parametrize("kind", SHAPES)
def test_samples_down_to_the_smallest_norm_are_scaled_to_one(kind):
    layer, sample = layer_for(kind), torch.zeros(2, *SHAPES[kind], dtype=torch.float64)
    sample.flatten(1)[:, 0] = torch.tensor([1e-7, 1e-10])
    norms = layer.preprocess(sample).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([1.0, 1e-2]).double())


@pytest.mark.parametrize("kind", SHAPES)
def test_the_rates_are_the_published_ones(kind):
    x, y = samples(SHAPES[kind])
    v = layer_for(kind).preprocess(x)
    size = math.prod(v.shape[2:])

    def rate(members):
        m, channels, *_ = members.shape
        total = 0.0
        for place in product(*(range(n) for n in v.shape[2:])):
            rows = members[(slice(None), slice(None), *place)]
            total += torch.eye(channels).add(channels / (m * 0.1) * rows.mT @ rows.conj()).slogdet().logabsdet.item()
        return total / (2 * size)

    compressed = sum((y == j).sum().item() / len(y) * rate(v[y == j]) for j in range(3))
    assert mcr2(v, y, 0.1) == pytest.approx((rate(v) - compressed, rate(v), compressed), rel=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_samples_in_single_precision_are_solved_in_double(kind):
    x, y = samples(SHAPES[kind])
    layer, wide = layer_for(kind), double(layer_for(kind))
    v = layer.preprocess(x.float())
    same = v.to(torch.promote_types(v.dtype, torch.float64))
    layer.init(v, y)
    wide.init(same, y)
    for own, other in zip(layer.parameters(), wide.parameters(), strict=True):
        assert torch.equal(own, other.to(own.dtype))
    assert mcr2(v, y, 1e-3) == mcr2(same, y, 1e-3)
