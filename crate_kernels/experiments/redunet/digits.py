"""Digits in polar coordinates, turned by any angle: the book's second example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from crate_kernels.experiments.demo import data
from crate_kernels.experiments.redunet.settings import ReduNetSettings
from crate_kernels.models.redunet import Fourier1D, Lift1D, NearestSubspace, ReduNet1D, ReduNet1DConfig, mcr2, polar


@dataclass(frozen=True, eq=False)
class Turned:
    """Results of a shift-invariant network on turned digits.

    Attributes:
        name: of the digits. rates: (layers + 1, 3), R - Rc, R and Rc of the training samples.
        cosines: absolute cosines between training features, classes in order.
        upright, turned: test accuracies of the last layer's estimate, of upright and of turned digits.
        pixels_upright, pixels_turned: those of the nearest subspace on the polar pictures themselves.
        features_upright, features_turned: those of the nearest subspace on the network's features.
        invariance: the largest difference between the features of a shifted digit and the shifted features of the
            digit; shifts are along the angles.
        examples: a digit, (side, side), and its polar picture, (radii, angles).
    """

    name: str
    rates: Tensor
    cosines: Tensor
    upright: float
    turned: float
    pixels_upright: float
    pixels_turned: float
    features_upright: float
    features_turned: float
    invariance: float
    examples: tuple[Tensor, Tensor]


def _first_of_each(images: Tensor, labels: Tensor, settings: ReduNetSettings, count: int) -> tuple[Tensor, Tensor]:
    """Take the first images of each class, in the order of the classes, labelled 0, 1, ..."""
    chosen = [(labels == each).nonzero().flatten()[:count] for each in settings.digits]
    classes = torch.cat([torch.full((len(c),), i) for i, c in enumerate(chosen)])
    return images[torch.cat(chosen)].double(), classes


@torch.no_grad()
def build(settings: ReduNetSettings, device: torch.device, advance: Callable[[], None]) -> Turned:
    """Build the network from upright digits, and test it on turned ones."""
    digits = data.load()
    train, labels = _first_of_each(digits.train_images, digits.train_labels, settings, settings.images)
    test, classes = _first_of_each(digits.test_images, digits.test_labels, settings, settings.tests)
    # An empty pixel is 0 here, the value outside the picture.
    x, unseen = (polar(i - digits.black, settings.channels, settings.timesteps).to(device) for i in (train, test))
    picture, channels = unseen[0].cpu(), settings.kernels or settings.channels
    if settings.kernels:
        lift = Lift1D(settings.channels, settings.kernels, settings.kernel_size).to(x)
        x, unseen = lift(x), lift(unseen)
    y, y_test = labels.to(device), classes.to(device)
    # A turn of the digit is a shift along the angles.
    step = settings.timesteps // settings.turns
    shifts = [step * turn for turn in range(1, settings.turns + 1)]
    spun = torch.cat([unseen.roll(shift, -1) for shift in shifts])
    y_spun = y_test.repeat(len(shifts))

    config = ReduNet1DConfig(
        len(settings.digits), settings.polar_layers, channels, settings.timesteps,
        settings.eta, settings.eps, settings.lmbda,
    )  # fmt: skip
    net = ReduNet1D(config).to(device)
    for parameter in net.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float64))
    layers = [cast(Fourier1D, layer) for layer in net]
    first, last = layers[0], layers[-1]
    z, z_test, z_spun = (first.preprocess(each) for each in (x, unseen, spun))
    rates = [mcr2(z, y, settings.eps)]
    estimate = estimate_spun = y_test
    for layer in layers:
        layer.init(z, y)
        z, _ = layer(z, return_y=True)
        z_test, estimate = layer(z_test, return_y=True)
        z_spun, estimate_spun = layer(z_spun, return_y=True)
        rates.append(mcr2(z, y, settings.eps))
        advance()
    features, features_test, features_spun = (last.postprocess(each) for each in (z, z_test, z_spun))
    back = features_test.roll(shifts[0], -1)
    flat = features.flatten(1)
    raw = NearestSubspace().fit(x, y)
    found = NearestSubspace().fit(features, y)

    def share(estimated: Tensor, labels: Tensor) -> float:
        return float((estimated == labels).double().mean())

    return Turned(
        f"{digits.name}; {', '.join(str(d) for d in settings.digits)}",
        torch.tensor(rates),
        (flat @ flat.mT).abs().cpu(),
        share(estimate, y_test),
        share(estimate_spun, y_spun),
        raw.score(unseen, y_test),
        raw.score(spun, y_spun),
        found.score(features_test, y_test),
        found.score(features_spun, y_spun),
        float((features_spun[: len(back)] - back).abs().max()),
        (test[0, 0], picture),
    )
