"""The experiment: build both networks, and report their results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import BLUE, CYCLE, GREEN, ORANGE, axes, bare
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.redunet import digits, gaussians
from crate_kernels.experiments.redunet.digits import Turned
from crate_kernels.experiments.redunet.gaussians import Gaussians
from crate_kernels.experiments.redunet.settings import ReduNetSettings

_SHARES = ("upright", "turned", "features_upright", "features_turned", "pixels_upright", "pixels_turned", "invariance")
_RATES = ((r"$\Delta R$", GREEN), ("$R$", BLUE), ("$R^c$", ORANGE))


def run(trial: Trial, settings: ReduNetSettings) -> int:
    """Build, measure and draw."""
    with trial.progress("three Gaussians in R^3", settings.layers) as advance:
        spheres = gaussians.build(settings, trial.seed, trial.device, advance)
    with trial.progress("digits in polar coordinates", settings.polar_layers) as advance:
        polar = digits.build(settings, trial.device, advance)

    def span(rates) -> str:
        return f"{rates[0, 0]:.3f} to {rates[-1, 0]:.3f}"

    def rising(rates) -> str:
        falls = int((rates[1:, 0] < rates[:-1, 0]).sum())
        return f"falls at {falls} of {len(rates) - 1} layers"

    def both(estimate: str, upright: float, turned: float) -> list[str]:
        return [f"  accuracy upright / turned, {estimate}", "-", f"{upright:.3f} / {turned:.3f}"]

    published = "rises, test with training (figure)"
    trial.compare(
        [
            [f"Gaussians, {settings.layers} layers: rate reduction, training", published, span(spheres.train_rates)],
            ["  of which", "", rising(spheres.train_rates)],
            ["  test", published, span(spheres.test_rates)],
            ["  classes as the last layer estimates them, test", "separate (figure)", f"{spheres.test_accuracy:.4f}"],
            [f"Digits, {settings.polar_layers} layers: rate reduction", "rises (figure)", span(polar.rates)],
            ["  of which", "", rising(polar.rates)],
            both("last layer's estimate", polar.upright, polar.turned),
            both("nearest subspace on features", polar.features_upright, polar.features_turned),
            both("nearest subspace on polar pixels", polar.pixels_upright, polar.pixels_turned),
            ["  features of a shifted digit, off its features shifted", "0 (theorem)", f"{polar.invariance:.1e}"],
        ]
    )
    numbers = {
        "gaussians": {
            "train_rates": spheres.train_rates.tolist(),
            "test_rates": spheres.test_rates.tolist(),
            "train_accuracy": spheres.train_accuracy,
            "test_accuracy": spheres.test_accuracy,
        },
        "digits": {
            "digits": polar.name,
            "rates": polar.rates.tolist(),
            **{key: getattr(polar, key) for key in _SHARES},
        },
    }
    drawn = {
        "rates": _draw_gaussian_rates(spheres),
        "sphere": _draw_sphere(spheres),
        "turned": _draw_turned(polar),
    }
    trial.write(drawn, numbers, settings)
    return 0


def _draw_rates(ax: Any, rates: Tensor, suffix: str = "", **style: Any) -> None:
    for column, (name, colour) in enumerate(_RATES):
        ax.plot(range(len(rates)), rates[:, column], color=colour, label=f"{name}{suffix}", **style)
    ax.set(xlabel="layer", ylabel="nats")


def _draw_gaussian_rates(found: Gaussians) -> Figure:
    """Draw the rates after each layer, of training samples and of test samples."""
    figure, ((ax,),) = axes(6.4, 3.8)
    _draw_rates(ax, found.train_rates, ", training", linewidth=4, alpha=0.35)
    _draw_rates(ax, found.test_rates, ", test", linewidth=1, linestyle="--")  # on top: the lines nearly coincide
    ax.set_xscale("symlog", linthresh=10)  # most change is in the first tenth
    ax.legend(frameon=False, ncols=2, fontsize=8)
    return figure


def _draw_sphere(found: Gaussians) -> Figure:
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


def _draw_turned(found: Turned) -> Figure:
    """Draw a digit, its polar picture, the rates by layer and the cosines between features."""
    figure, ((image, picture, rates, cosines),) = axes(13.5, 3.4, 1, 4, width_ratios=(0.8, 1.3, 1.3, 1.2))
    image.imshow(found.examples[0].numpy(), cmap="gray")
    image.set_title("a digit")
    bare(image)
    picture.imshow(found.examples[1].numpy(), cmap="gray", aspect="auto")
    picture.set(title="in polar coordinates", xlabel="angle", ylabel="radius")
    _draw_rates(rates, found.rates)
    rates.legend(frameon=False)
    drawn = cosines.imshow(found.cosines.numpy(), cmap="magma", vmin=0, vmax=1)
    cosines.set(title="cosines of features", xlabel="sample, by class", ylabel="sample, by class")
    figure.colorbar(drawn, ax=cosines, shrink=0.8)
    return figure
