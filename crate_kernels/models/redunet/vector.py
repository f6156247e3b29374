"""ReduNet on vectors."""

from __future__ import annotations

from dataclasses import dataclass

from crate_kernels.models._shared import official
from crate_kernels.models._shared.base import ReferenceModel
from crate_kernels.models.redunet.layers import Vector
from crate_kernels.models.redunet.network import ReduNet, ReduNetConfig


@dataclass(frozen=True)
class ReduNetVectorConfig(ReduNetConfig):
    """Config of a ReduNet on vectors: the published constructor's arguments.

    Attributes:
        num_classes, num_layers, d: classes, layers, dimension of a sample.
        eta: step size.
        eps: distortion (the book's eps^2).
        lmbda: sharpness of the class estimate.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    d: int
    eta: float = 0.5
    eps: float = 0.1
    lmbda: float = 500.0


class ReduNetVector(ReferenceModel, ReduNet):
    """A ReduNet on (m, d); see ``ReduNet`` and ``Vector``. Parameters under their published names."""

    config_class = ReduNetVectorConfig

    def __init__(self, config: ReduNetVectorConfig) -> None:
        super().__init__(config)
        c = config
        self.extend(Vector(c.eta, c.eps, c.lmbda, c.num_classes, c.d) for _ in range(c.num_layers))


# The book's three Gaussians in R^3, 500 samples each.
SIZES = {"redunet_gaussians": ReduNetVectorConfig(num_classes=3, num_layers=2000, d=3)}
Config, Model = ReduNetVectorConfig, ReduNetVector
SYSTEMS = {"redunet_vector": official.family(Config, Model)}
