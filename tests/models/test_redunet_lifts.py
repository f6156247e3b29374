"""What stands before ReduNet's layers and behind them: lifts, polar images, the nearest subspace."""

from itertools import product

import torch

from crate_kernels.models.redunet import Fourier1D, Lift1D, Lift2D, NearestSubspace, ReduNet, polar
from tests.models.redunets import EXACT, OPTIONS, double, samples


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
