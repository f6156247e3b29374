"""Lifts to more channels, by random filters or polar coordinates, which make shift-invariant classes separable."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crate_kernels._core import checks

_KERNELS = {"gaussian0.1": 0.1, "gaussian1.0": 1.0, "gaussian5.0": 5.0, "uniform0.1": 0.1, "uniform0.5": 0.5}


class Lift(nn.Module):
    """Correlate with random filters around the circle, then ReLU: ``relu(k * x)`` (ReduNet, Section 4.1).

    Parameters: ``kernel``, out_channel by in_channel by ``naxes`` times kernel_size. It is drawn from ``seed`` alone,
    with the published values. The published code seeds torch's global generator; this code does not change it.

    Args:
        naxes: 1 for signals, 2 for images.
        in_channel, out_channel: channels before and after.
        kernel_size: size of the filters along each axis.
        init_mode: ``"gaussian"`` or ``"uniform"`` followed by the standard deviation or the bound: gaussian0.1,
            gaussian1.0 (the default), gaussian5.0, uniform0.1 or uniform0.5.
        stride: stride of the correlation; default 1.
        trainable: give the filters a gradient; default False.
        relu: apply the ReLU; default True.
        seed: seed of the filters; default 0.
    """

    def __init__(
        self,
        naxes: int,
        in_channel: int,
        out_channel: int,
        kernel_size: int,
        init_mode: str = "gaussian1.0",
        stride: int = 1,
        trainable: bool = False,
        relu: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if init_mode not in _KERNELS:
            raise ValueError(f"Lift: init_mode must be one of {', '.join(_KERNELS)}, got {init_mode!r}")
        self.naxes, self.relu = naxes, checks.flag("Lift", "relu", relu)
        self.kernel_size = checks.integer("Lift", "kernel_size", kernel_size, minimum=1)
        self.stride = checks.integer("Lift", "stride", stride, minimum=1)
        checks.integer("Lift", "in_channel", in_channel, minimum=1)
        checks.integer("Lift", "out_channel", out_channel, minimum=1)
        shape = (out_channel, in_channel, *[kernel_size] * naxes)
        generator, spread = torch.Generator().manual_seed(seed), _KERNELS[init_mode]
        if init_mode.startswith("gaussian"):
            kernel = spread * torch.randn(shape, generator=generator)
        else:
            kernel = 2 * spread * torch.rand(shape, generator=generator) - spread
        self.kernel = nn.Parameter(kernel, requires_grad=trainable)

    def forward(self, z: Tensor) -> Tensor:
        """Map (m, in_channel, sizes) to (m, out_channel, sizes / stride)."""
        z = F.pad(z, (0, self.kernel_size - 1) * self.naxes, "circular")
        out = (F.conv1d if self.naxes == 1 else F.conv2d)(z, self.kernel, stride=self.stride)
        return out.relu() if self.relu else out


class Lift1D(Lift):
    """Lift signals (m, in_channel, timesteps); arguments as ``Lift``'s after ``naxes``."""

    def __init__(self, in_channel: int, out_channel: int, kernel_size: int, *args, **kwargs) -> None:
        super().__init__(1, in_channel, out_channel, kernel_size, *args, **kwargs)


class Lift2D(Lift):
    """Lift images (m, in_channel, height, width); arguments as ``Lift``'s after ``naxes``."""

    def __init__(self, in_channel: int, out_channel: int, kernel_size: int, *args, **kwargs) -> None:
        super().__init__(2, in_channel, out_channel, kernel_size, *args, **kwargs)


def polar(images: Tensor, channels: int = 15, timesteps: int = 200) -> Tensor:
    """Sample images along circles around their centre: a rotation of the image shifts the angles.

    Radii are evenly spaced from the centre to the edge, angles evenly over one turn. Values are interpolated
    bilinearly. (The published code rotates the image to the nearest pixel and repeats the first angle at 360
    degrees, so a rotation is not exactly a shift there.)

    Args:
        images: (m, 1, side, side).
        channels: number of radii; default 15.
        timesteps: number of angles; default 200, as in the book.

    Returns:
        Samples (m, channels, timesteps), one radius per channel.
    """
    radii = torch.linspace(0, 1 - 1 / images.shape[-1], channels, dtype=images.dtype, device=images.device)
    turn = torch.arange(timesteps, dtype=images.dtype, device=images.device) * (2 * math.pi / timesteps)
    # In grid_sample's coordinates, -1 and 1 are the outer edges of the outer pixels.
    grid = torch.stack((torch.outer(radii, turn.cos()), torch.outer(radii, turn.sin())), -1)
    grid = grid.expand(len(images), -1, -1, -1)
    return cast(Tensor, F.grid_sample(images, grid, align_corners=False))[:, 0]
