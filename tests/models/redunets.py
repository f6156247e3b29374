"""Layers, samples and networks of the tests of ReduNet."""

import torch

from crate_kernels.models.redunet import Fourier1D, Fourier2D, ReduNetVector, ReduNetVectorConfig, Vector

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
    """Three classes, each near another direction."""
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


def network(layers=6):
    torch.manual_seed(0)
    return double(ReduNetVector(ReduNetVectorConfig(num_classes=3, num_layers=layers, d=4, lmbda=20.0)))
