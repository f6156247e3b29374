"""ReduNet on images, invariant to circular shifts."""

from __future__ import annotations

from dataclasses import dataclass

from crate_kernels.models._shared import official
from crate_kernels.models._shared.base import ReferenceModel
from crate_kernels.models.redunet.layers import Fourier2D, complex_operators
from crate_kernels.models.redunet.network import ReduNet, ReduNetConfig


@dataclass(frozen=True)
class ReduNet2DConfig(ReduNetConfig):
    """Config of a shift-invariant ReduNet on images: the published constructor's arguments.

    Attributes:
        num_classes, num_layers: classes and layers.
        channels, height, width: shape of a sample.
        eta: step size.
        eps: distortion (the book's eps^2).
        lmbda: sharpness of the class estimate.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    channels: int
    height: int
    width: int
    eta: float = 0.5
    eps: float = 0.1
    lmbda: float = 500.0


class ReduNet2D(ReferenceModel, ReduNet):
    """A ReduNet on (m, channels, height, width); see ``ReduNet`` and ``Fourier2D``. Published parameter names."""

    config_class = ReduNet2DConfig

    def __init__(self, config: ReduNet2DConfig) -> None:
        super().__init__(config)
        c, dimensions = config, (config.channels, config.height, config.width)
        self.extend(Fourier2D(c.eta, c.eps, c.lmbda, c.num_classes, dimensions) for _ in range(c.num_layers))


SIZES: dict[str, ReduNet2DConfig] = {}
Config, Model = ReduNet2DConfig, ReduNet2D
SYSTEMS = {"redunet_2d": official.family(Config, Model, weights=complex_operators)}
