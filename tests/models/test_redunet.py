"""ReduNet: layers against the published loops, construction, invariance, loading, the golden files."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from crate_kernels import models
from crate_kernels.models import redunet
from crate_kernels.models.redunet import (
    Fourier1D,
    Fourier2D,
    Lift1D,
    Lift2D,
    NearestSubspace,
    ReduNet,
    ReduNet1D,
    ReduNet1DConfig,
    ReduNet2D,
    ReduNet2DConfig,
    ReduNetVector,
    ReduNetVectorConfig,
    Vector,
    mcr2,
    polar,
)

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
EXACT = {"rtol": 1e-11, "atol": 1e-11}
OPTIONS = (0.5, 0.1, 20.0)  # a soft estimate: with the published 500, softmax would hide a wrong one
SHAPES = {
    **{"vector": (4,), "signal": (3, 5), "image": (2, 3, 4)},
    **{"as-many-channels-as-samples": (24,), "all-as-many-as-classes": (3, 3, 3)},
}
LAYERS = {1: lambda s: Vector(*OPTIONS, 3, s[0]), 2: lambda s: Fourier1D(*OPTIONS, 3, s),
          3: lambda s: Fourier2D(*OPTIONS, 3, s)}  # fmt: skip


def layer_for(kind):
    return LAYERS[len(SHAPES[kind])](SHAPES[kind])


def samples(shape, m=24, seed=0):
    """Three classes, each near a direction of its own."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(m) % 3
    y[-3:] = 1  # classes of unequal size
    centres = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    return centres[y] + 0.3 * torch.randn(m, *shape, generator=g, dtype=torch.float64), y


def double(module):
    """Turn a fresh module's weights to double precision; ``.double()`` leaves complex ones as they are."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float64))
    return module


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


def network(layers=6):
    torch.manual_seed(0)
    return double(ReduNetVector(ReduNetVectorConfig(num_classes=3, num_layers=layers, d=4, lmbda=20.0)))


def test_construction_is_layer_by_layer_and_reproduced_by_forward():
    x, y = samples((4,))
    net = network()
    out = net.init(x, y)
    losses = net.get_loss()
    assert losses["layer"] == list(range(6))
    z = net[0].preprocess(x)
    for index, layer in enumerate(net):
        again = double(Vector(0.5, 0.1, 20.0, 3, 4))
        again.init(z, y)
        torch.testing.assert_close(layer.E.weight, again.E.weight, **EXACT)
        z, estimates = layer(z, return_y=True)
        total, expanded, compressed = mcr2(z.detach(), estimates, 0.1)
        assert losses["loss_total"][index] == pytest.approx(total)
        assert losses["loss_expd"][index] == pytest.approx(expanded)
        assert losses["loss_comp"][index] == pytest.approx(compressed)
    torch.testing.assert_close(out, net(x).detach(), **EXACT)
    torch.testing.assert_close(net.batch_forward(x, batch_size=7), net(x), **EXACT)
    assert net.get_loss()["layer"] == []  # nothing was asked to be measured
    net(x, loss=True)
    assert net.get_loss()["loss_total"] == pytest.approx(losses["loss_total"])
    net(x, labels=y, loss=True)
    assert net.get_loss()["loss_total"][-1] == pytest.approx(mcr2(z.detach(), y, 0.1)[0])


SLICED = {
    "vector": lambda: network(4),
    "signal": lambda: double(ReduNet1D(ReduNet1DConfig(3, 4, 3, 5, lmbda=20.0))),
    "image": lambda: double(ReduNet2D(ReduNet2DConfig(3, 4, 2, 3, 4, lmbda=20.0))),
    "plain": lambda: ReduNet(*network(4)),
}


@pytest.mark.parametrize("kind", SLICED)
def test_slices_are_networks_one_after_the_other(kind):
    net = SLICED[kind]()
    x, y = samples(SHAPES.get(kind, (4,)))
    net.init(x, y)
    parts = net[:2], net[2:]
    assert [type(part) for part in parts] == [ReduNet, ReduNet]
    assert [*parts[0], *parts[1]] == [*net]
    assert {name: 0 for part in parts for name in part.state_dict()} == dict.fromkeys(net.state_dict(), 0)
    torch.testing.assert_close(parts[1](parts[0](x)), net(x), **EXACT)
    assert net[-1] is [*net][-1]


def test_construction_raises_the_rate_reduction():
    x, y = samples((4,), m=60)
    net = network(40)
    start = mcr2(net[0].preprocess(x), y, 0.1)[0]
    net.init(x, y)
    net(x, labels=y, loss=True)
    total = net.get_loss()["loss_total"]
    assert start < total[0] < total[-1]
    assert total == sorted(total)


def test_update_moves_by_tau_and_leaves_gam():
    x, y = samples((4,))
    more, classes = samples((4,), m=30, seed=5)
    net, other = network(1), network(1)
    net.init(x, y)
    other.init(more, classes)
    before, gam = net[0].operators.detach(), net[0].gam.clone()
    net.update(more, classes, tau=0.25)
    wanted = before + 0.25 * (other[0].operators.detach() - before)
    torch.testing.assert_close(net[0].operators.detach(), wanted, **EXACT)
    assert torch.equal(net[0].gam, gam)
    assert not torch.equal(gam, other[0].gam)
    net.update(more, classes, tau=1.0)
    torch.testing.assert_close(net[0].operators, other[0].operators, **EXACT)


def test_zero_makes_every_layer_the_identity():
    x, y = samples((4,))
    net = network()
    net.init(x, y)
    gam = net[0].gam.clone()
    assert net.zero() is net
    torch.testing.assert_close(net(x), net[0].preprocess(x), **EXACT)
    assert torch.equal(net[0].gam, gam)


@pytest.mark.parametrize("kind", ["signal", "image"])
def test_a_shift_of_the_input_is_a_shift_of_the_output(kind):
    x, y = samples(SHAPES[kind])
    net = double(ReduNet(*(layer_for(kind) for _ in range(3))))
    out = net.init(x, y)
    axes = tuple(range(2, x.dim()))
    shifts = (2,) * len(axes)
    moved = net(x.roll(shifts, axes)).detach()
    torch.testing.assert_close(moved, out.roll(shifts, axes), rtol=1e-9, atol=1e-9)


def test_the_network_can_be_trained_on():
    x, y = samples((4,))
    net = network(2)
    net.init(x, y)
    net(x).square().sum(0)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_a_lift_correlates_around_the_circle():
    x = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(1))
    lift = Lift1D(2, 3, 4, relu=False)
    wanted = torch.zeros(2, 3, 6)
    for m, o, t in product(range(2), range(3), range(6)):
        wanted[m, o, t] = sum(lift.kernel[o, c, k] * x[m, c, (t + k) % 6] for c in range(2) for k in range(4))
    torch.testing.assert_close(lift(x), wanted)
    torch.testing.assert_close(Lift1D(2, 3, 4)(x), wanted.relu())
    assert torch.equal(Lift1D(2, 3, 4, stride=2, relu=False)(x), lift(x)[..., ::2])
    image = torch.randn(1, 1, 5, 5, generator=torch.Generator().manual_seed(2))
    moved = Lift2D(1, 2, 3, "uniform0.5")
    torch.testing.assert_close(moved(image.roll((1, 2), (2, 3))), moved(image).roll((1, 2), (2, 3)))
    assert moved.kernel.abs().max() <= 0.5
    assert not moved.kernel.requires_grad


def test_a_lift_has_the_published_filters_and_leaves_the_generator_alone():
    torch.manual_seed(0)
    published = torch.distributions.Normal(0.0, 5.0).sample((3, 1, 4))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert torch.equal(Lift1D(1, 3, 4, "gaussian5.0").kernel, published)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_lift_stands_before_the_layers():
    x, y = samples((1, 8))
    net = ReduNet(Lift1D(1, 3, 3).double(), double(Fourier1D(*OPTIONS, 3, (3, 8))))
    net.init(x, y)
    torch.testing.assert_close(net(x), net[1].postprocess(net[1](net[1].preprocess(net[0](x)))), **EXACT)
    assert sorted(net.state_dict())[0] == "0.kernel"


def test_turning_an_image_shifts_its_angles():
    g = torch.Generator().manual_seed(0)
    image = torch.randn(2, 1, 9, 9, generator=g).double()
    seen = polar(image, channels=4, timesteps=8)
    assert seen.shape == (2, 4, 8)
    quarter = polar(image.rot90(1, (2, 3)), channels=4, timesteps=8)
    shifts = [s for s in range(8) if torch.allclose(quarter, seen.roll(s, -1))]
    assert shifts == [6]  # against the angles, which run as the y axis: downwards
    torch.testing.assert_close(seen[:, 0], image[:, 0, 4, 4, None].expand(-1, 8))
    torch.testing.assert_close(seen[:, -1, 0], image[:, 0, 4, -1])


def test_nearest_subspace():
    g = torch.Generator().manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(9, 2, generator=g, dtype=torch.float64)).Q for _ in range(3)]
    y = torch.arange(60) % 3
    z = torch.stack([bases[j] @ torch.randn(2, generator=g, dtype=torch.float64) for j in y.tolist()])
    found = NearestSubspace(2).fit(z, y)
    assert found.score(z, y) == 1.0
    noisy = z + 0.1 * torch.randn(60, 9, generator=g, dtype=torch.float64)
    wanted = torch.stack([(noisy - noisy @ b @ b.mT).norm(dim=1) for b in bases], 1)
    torch.testing.assert_close(found.residuals(noisy), wanted)
    assert torch.equal(found.predict(noisy), wanted.argmin(1))
    # More components than a class has samples: the subspace is what the samples span.
    assert NearestSubspace(50).fit(z.view(60, 3, 3), y).bases.shape == (3, 9, 50)


def golden(system):
    with safe_open(GOLDEN / f"{system}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # a file, not a mapping
        config = json.loads(file.metadata()["config"])
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    return tensors, state, config


def close(actual, published, oracle):
    """Within twice the published code's own distance from double precision, as everywhere."""
    published, oracle = published.double(), oracle.double()
    eps = torch.finfo(torch.float32).eps * oracle.abs().max()
    off = (published - oracle).abs().max()
    # Inverses lose digits by their condition number, about 1e3 here.
    assert off <= 1e3 * eps, "the oracle is not the published function"
    assert (actual.detach().double() - oracle).abs().max() <= 2 * (off + eps)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the golden files at ../shared/golden")
@pytest.mark.parametrize("system", ["redunet_vector", "redunet_2d"])
def test_published_networks(system):
    tensors, state, config = golden(system)
    net: Any = models.from_official(system, state, config)
    built: Any = type(net)(net.config)
    oracle: Any = double(type(net)(net.config))
    exact = oracle.init(tensors["input"].double(), tensors["labels"])
    output = built.init(tensors["input"], tensors["labels"])
    close(output, tensors["output"], exact)
    close(net(tensors["input"]), tensors["output"], exact)
    exact = oracle(tensors["test_input"].double()).detach()
    close(net(tensors["test_input"]), tensors["test_output"], exact)
    close(built(tensors["test_input"]), tensors["test_output"], exact)
    assert set(state) == set(built.state_dict())
    for name, value in built.state_dict().items():
        published, reference = net.state_dict()[name], oracle.state_dict()[name]
        if value.is_complex():
            value, published, reference = (torch.view_as_real(t) for t in (value, published, reference))
        close(value, published, reference)


def test_complex_weights_load_as_such_or_as_pairs():
    config = {"num_classes": 2, "num_layers": 2, "channels": 2, "timesteps": 2}
    net: Any = ReduNet1D(ReduNet1DConfig(**config))
    state = net.state_dict()
    pairs = {name: torch.view_as_real(v) if v.is_complex() else v for name, v in state.items()}
    for given in (state, pairs):
        loaded = models.from_official("redunet_1d", given, config).state_dict()
        assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["redunet_vector", "redunet_1d", "redunet_2d"])
def test_a_folder_keeps_a_network(name, tmp_path):
    sizes = {"redunet_vector": {"d": 3}, "redunet_1d": {"channels": 2, "timesteps": 3}}
    config = {"num_classes": 2, "num_layers": 2, **sizes.get(name, {"channels": 2, "height": 2, "width": 3})}
    family = {"redunet_vector": redunet.vector, "redunet_1d": redunet.fourier1d, "redunet_2d": redunet.fourier2d}[name]
    net = family.Model(family.Config(**config))
    again: Any = models.from_pretrained(net.save_pretrained(tmp_path / "net"))
    assert again.config == net.config
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in net.state_dict().items())


def test_the_books_networks_have_names():
    net: Any = models.create("redunet_gaussians", num_layers=2)
    assert [len(net), net.config.d, net.config.num_classes] == [2, 3, 3]
    net = models.create("redunet_polar", num_layers=1)
    assert net[0].E.weight.shape == (15, 15, 200)
    assert net[0].E.weight.is_complex()


BAD = {
    "eps": (lambda: Vector(0.5, 0.0, 1.0, 2, 3), ValueError, "Vector: eps must be > 0, got 0.0"),
    "classes": (lambda: Vector(0.5, 0.1, 1.0, 0, 3), ValueError, "Vector: num_classes must be >= 1, got 0"),
    "layers": (lambda: ReduNetVectorConfig(2, 0, 3), ValueError, "ReduNet: num_layers must be >= 1, got 0"),
    "shape": (lambda: network()(torch.ones(2, 5)), ValueError, r"Vector: input must be \(m, 4\), got \(2, 5\)"),
    "labels-type": (lambda: network().init(torch.ones(2, 4), [0, 1]), TypeError, "Vector: y must be a Tensor, got li"),
    "labels-float": (lambda: network().init(torch.ones(2, 4), torch.ones(2)), ValueError, "y must have an integer"),
    "labels-shape": (
        lambda: network().init(torch.ones(2, 4), torch.zeros(3, dtype=torch.long)),
        ValueError,
        r"Vector: y must be \(m,\) = \(2,\), got \(3,\)",
    ),
    "labels-range": (
        lambda: network().init(torch.ones(2, 4), torch.tensor([0, 3])),
        ValueError,
        r"y must hold labels in 0..2, got the range \[0, 3\]",
    ),
    "labels-empty": (
        lambda: network().init(torch.ones(2, 4), torch.tensor([0, 2])),
        ValueError,
        r"Vector: y must hold every class, got none of \[1\]",
    ),
    "lift": (lambda: Lift1D(1, 2, 3, "gauss"), ValueError, "Lift: init_mode must be one of gaussian0.1.*'gauss'"),
    "lift-channels": (lambda: Lift1D(0, 2, 3), ValueError, "Lift: in_channel must be >= 1, got 0"),
    "signal": (lambda: Fourier1D(*OPTIONS, 3, 4), ValueError, r"dimensions must be \(channels, timesteps\), got 4"),
    "image": (lambda: Fourier2D(*OPTIONS, 3, (2, 3)), ValueError, r"\(channels, height, width\), got \(2, 3\)"),
    "rates": (lambda: mcr2(*samples((4,)), 0), ValueError, "mcr2: eps must be > 0, got 0"),
    "unfitted": (lambda: NearestSubspace().predict(torch.ones(1, 2)), RuntimeError, "fit must come before predict"),
    "tau": (lambda: network().update(*samples((4,)), tau="1"), TypeError, "ReduNet: tau must be a number, got str"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
