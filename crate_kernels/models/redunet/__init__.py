"""ReduNet: a network built by forward steps of rate reduction (Chan et al. 2021, arXiv 2105.10446)."""

from .classifier import NearestSubspace
from .fourier1d import ReduNet1D, ReduNet1DConfig
from .fourier2d import ReduNet2D, ReduNet2DConfig
from .layers import Fourier1D, Fourier2D, ReduLayer, Vector
from .lifts import Lift, Lift1D, Lift2D, polar
from .network import ReduNet, ReduNetConfig
from .rates import mcr2
from .vector import ReduNetVector, ReduNetVectorConfig

__all__ = [
    "Fourier1D",
    "Fourier2D",
    "Lift",
    "Lift1D",
    "Lift2D",
    "NearestSubspace",
    "ReduLayer",
    "ReduNet",
    "ReduNet1D",
    "ReduNet1DConfig",
    "ReduNet2D",
    "ReduNet2DConfig",
    "ReduNetConfig",
    "ReduNetVector",
    "ReduNetVectorConfig",
    "Vector",
    "mcr2",
    "polar",
]
