"""ReduNet as a network: construction, slices, updates, invariance, refusals."""

import pytest
import torch

from crate_kernels.models.redunet import (
    Fourier1D,
    Fourier2D,
    Lift1D,
    NearestSubspace,
    ReduNet,
    ReduNet1D,
    ReduNet1DConfig,
    ReduNet2D,
    ReduNet2DConfig,
    Vector,
    mcr2,
)
from tests.models.redunets import EXACT, OPTIONS, SHAPES, double, layer_for, network, samples


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


BAD = {
    "eps": (lambda: Vector(0.5, 0.0, 1.0, 2, 3), ValueError, "Vector: eps must be > 0, got 0.0"),
    "classes": (lambda: Vector(0.5, 0.1, 1.0, 0, 3), ValueError, "Vector: num_classes must be >= 1, got 0"),
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
    "subspace-empty": (
        lambda: NearestSubspace().fit(torch.ones(2, 4), torch.tensor([0, 2])),
        ValueError,
        "NearestSubspace: y must hold every class, got none of 1",
    ),
    "unfitted": (lambda: NearestSubspace().predict(torch.ones(1, 2)), RuntimeError, "fit must come before predict"),
    "tau": (lambda: network().update(*samples((4,)), tau="1"), TypeError, "ReduNet: tau must be a number, got str"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
