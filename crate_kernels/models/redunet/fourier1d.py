"""ReduNet on signals, invariant to circular shifts."""

from __future__ import annotations

from dataclasses import dataclass

from crate_kernels.models._shared import official
from crate_kernels.models._shared.base import ReferenceModel
from crate_kernels.models.redunet.layers import Fourier1D, complex_operators
from crate_kernels.models.redunet.network import ReduNet, ReduNetConfig


@dataclass(frozen=True)
class ReduNet1DConfig(ReduNetConfig):
    """Config of a shift-invariant ReduNet on signals: the published constructor's arguments.

    Attributes:
        num_classes, num_layers: classes and layers.
        channels, timesteps: shape of a sample.
        eta: step size.
        eps: distortion (the book's eps^2).
        lmbda: sharpness of the class estimate.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    channels: int
    timesteps: int
    eta: float = 0.5
    eps: float = 0.1
    lmbda: float = 500.0


class ReduNet1D(ReferenceModel, ReduNet):
    """A ReduNet on (m, channels, timesteps); see ``ReduNet`` and ``Fourier1D``. Published parameter names."""

    config_class = ReduNet1DConfig

    def __init__(self, config: ReduNet1DConfig) -> None:
        super().__init__(config)
        c, dimensions = config, (config.channels, config.timesteps)
        self.extend(Fourier1D(c.eta, c.eps, c.lmbda, c.num_classes, dimensions) for _ in range(c.num_layers))


# The book's digits in polar coordinates: 15 radii, 200 angles.
SIZES = {"redunet_polar": ReduNet1DConfig(num_classes=10, num_layers=40, channels=15, timesteps=200)}
Config, Model = ReduNet1DConfig, ReduNet1D
SYSTEMS = {"redunet_1d": official.family(Config, Model, weights=complex_operators)}
