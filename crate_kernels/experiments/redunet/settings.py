"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReduNetSettings:
    """The two networks and their data.

    Attributes:
        samples: per Gaussian (three in R^3), to build from and to test on. noise: their deviation.
        layers: of the network on them. eta, eps, lmbda: of all layers, as published.
        digits: classes of digits. images: per class, to build from. tests: images per class, to test on.
        channels, timesteps: radii and angles of the polar pictures. polar_layers: of the network on them.
        kernels: random filters of ``kernel_size`` angles that lift the polar pictures; 0 leaves them as they are.
        turns: rotations of the test digits, evenly over the circle.
    """

    samples: int = 500
    noise: float = 0.1
    layers: int = 2000
    eta: float = 0.5
    eps: float = 0.1
    lmbda: float = 500.0
    digits: tuple[int, ...] = (0, 1, 2, 3, 4)
    images: int = 20
    tests: int = 20
    channels: int = 15
    timesteps: int = 200
    polar_layers: int = 40
    kernels: int = 0
    kernel_size: int = 5
    turns: int = 4


PRESETS = {
    "default": ReduNetSettings(),
    # "Invariant Classification of Digits" of Buchanan, Pai, Wang and Ma 2025, which has these Gaussians too.
    "paper": ReduNetSettings(digits=tuple(range(10)), images=10, tests=10, kernels=20, turns=20),
    "quick": ReduNetSettings(
        samples=20, layers=10, digits=(0, 1), images=8, tests=4, timesteps=16, polar_layers=2, turns=2
    ),
}
