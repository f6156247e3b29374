"""Three Gaussians on the sphere: the book's first example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from crate_kernels.experiments.common.draws import generator
from crate_kernels.experiments.redunet.settings import ReduNetSettings
from crate_kernels.models.redunet import ReduNetVector, ReduNetVectorConfig, Vector, mcr2
from crate_kernels.models.redunet.layers import normalize


@dataclass(frozen=True, eq=False)
class Gaussians:
    """The samples before and after the network, and its measurements.

    Attributes:
        train, test: samples on the sphere (m, 3) and their outputs. labels: (m,), of either.
        train_rates, test_rates: (layers + 1, 3), R - Rc, R and Rc under the true labels, before the first layer
            and after each.
        train_accuracy, test_accuracy: of the last layer's own estimate of the class.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    labels: Tensor
    train_rates: Tensor
    test_rates: Tensor
    train_accuracy: float
    test_accuracy: float


def draw(settings: ReduNetSettings, *purpose: int) -> tuple[Tensor, Tensor]:
    """Draw ``samples`` around each axis of R^3, on the unit sphere, in float64, and their labels."""
    labels = torch.arange(3).repeat_interleave(settings.samples)
    noise = torch.randn(len(labels), 3, generator=generator(*purpose), dtype=torch.float64)
    return normalize(torch.eye(3, dtype=torch.float64)[labels] + settings.noise * noise), labels


def build(settings: ReduNetSettings, seed: int, device: torch.device, advance: Callable[[], None]) -> Gaussians:
    """Build the network layer by layer, and pass test samples through each layer."""
    (x, labels), (unseen, _) = draw(settings, seed, 0), draw(settings, seed, 1)
    y = labels.to(device)
    config = ReduNetVectorConfig(3, settings.layers, 3, settings.eta, settings.eps, settings.lmbda)
    net = ReduNetVector(config).to(device, torch.float64)
    z, z_test = x.to(device), unseen.to(device)
    rates = [(mcr2(z, y, settings.eps), mcr2(z_test, y, settings.eps))]
    estimate = estimate_test = y
    with torch.no_grad():
        for layer in (cast(Vector, each) for each in net):
            layer.init(z, y)
            z, estimate = layer(z, return_y=True)
            z_test, estimate_test = layer(z_test, return_y=True)
            rates.append((mcr2(z, y, settings.eps), mcr2(z_test, y, settings.eps)))
            advance()
    train_rates, test_rates = (torch.tensor([pair[side] for pair in rates]) for side in (0, 1))
    return Gaussians(
        (x, z.cpu()),
        (unseen, z_test.cpu()),
        labels,
        train_rates,
        test_rates,
        float((estimate == y).double().mean()),
        float((estimate_test == y).double().mean()),
    )
