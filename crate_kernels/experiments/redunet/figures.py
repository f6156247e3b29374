"""The figures of ``redunet``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import BLUE, CYCLE, GREEN, ORANGE, axes, bare
from crate_kernels.experiments.redunet.digits import Turned
from crate_kernels.experiments.redunet.gaussians import Gaussians

_NAMES = ((r"$\Delta R$", GREEN), ("$R$", BLUE), ("$R^c$", ORANGE))


def _rates(ax: Any, rates: Tensor, suffix: str = "", **style: Any) -> None:
    for column, (name, colour) in enumerate(_NAMES):
        ax.plot(range(len(rates)), rates[:, column], color=colour, label=f"{name}{suffix}", **style)
    ax.set(xlabel="layer", ylabel="nats")


def gaussian_rates(found: Gaussians) -> Figure:
    """Draw the rates after each layer, of training samples and of test samples."""
    figure, ((ax,),) = axes(6.4, 3.8)
    _rates(ax, found.train_rates, ", training", linewidth=4, alpha=0.35)
    _rates(ax, found.test_rates, ", test", linewidth=1, linestyle="--")  # on top: the lines nearly coincide
    ax.set_xscale("symlog", linthresh=10)  # most change is in the first tenth
    ax.legend(frameon=False, ncols=2, fontsize=8)
    return figure


def sphere(found: Gaussians) -> Figure:
    """Draw the samples on the sphere, before and after."""
    figure = Figure(figsize=(10, 5.2), dpi=150, layout="constrained")
    u, v = np.mgrid[0 : 2 * math.pi : 25j, 0 : math.pi : 13j]  # pyright: ignore[reportArgumentType]
    for column, (name, points) in enumerate((("test samples", found.test[0]), ("after the last layer", found.test[1]))):
        ax: Any = figure.add_subplot(1, 2, column + 1, projection="3d")
        ball = np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v)
        ax.plot_wireframe(*ball, color="#bbbbbb", linewidth=0.4, alpha=0.6)
        for label in range(3):
            x, y, z = points[found.labels == label].T.numpy()
            ax.scatter(x, y, z, s=16, color=CYCLE[label], depthshade=False, label=f"class {label}")
        ax.set_title(name, y=1.02)  # above the box
        ax.set_box_aspect((1, 1, 1))
        ax.view_init(25, 40)
        ax.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(-1, 0, 1))
        if column == 0:
            ax.legend(frameon=False, loc="upper left")
    return figure


def turned(found: Turned) -> Figure:
    """Draw a digit, its polar picture, the rates by layer and the cosines between features."""
    figure, ((image, picture, rates, cosines),) = axes(13.5, 3.4, 1, 4, width_ratios=(0.8, 1.3, 1.3, 1.2))
    image.imshow(found.examples[0].numpy(), cmap="gray")
    image.set_title("a digit")
    bare(image)
    picture.imshow(found.examples[1].numpy(), cmap="gray", aspect="auto")
    picture.set(title="in polar coordinates", xlabel="angle", ylabel="radius")
    _rates(rates, found.rates)
    rates.legend(frameon=False)
    drawn = cosines.imshow(found.cosines.numpy(), cmap="magma", vmin=0, vmax=1)
    cosines.set(title="cosines of features", xlabel="sample, by class", ylabel="sample, by class")
    figure.colorbar(drawn, ax=cosines, shrink=0.8)
    return figure
