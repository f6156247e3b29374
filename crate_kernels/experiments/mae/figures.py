"""The figures of ``mae``."""

from __future__ import annotations

from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import BLUE, GREY, ORANGE, SKY, axes, bare, smoothed
from crate_kernels.experiments.common.fit import Fit
from crate_kernels.experiments.demo.data import Digits


def reconstruction(images: Tensor, filled: Tensor, masks: Tensor, digits: Digits) -> Figure:
    """Draw each digit, its masked form as the model saw it, and the reconstruction."""
    side, size = digits.side, digits.patch_size
    removed = masks.unflatten(1, (side, side)).repeat_interleave(size, 1).repeat_interleave(size, 2).bool()
    figure, grid = axes(1.35 * len(images) + 0.9, 5.8, 4, len(images))
    low, high = float(images.min()), float(images.max())
    for column, (image, prediction, hidden) in enumerate(zip(images[:, 0], filled[:, 0], removed, strict=True)):
        seen = image.where(~hidden, (low + high) / 2)
        both = prediction.where(hidden, image)
        pictures = (image, seen, both, prediction)
        for ax, picture in zip(grid[:, column], pictures, strict=True):
            ax.imshow(picture.numpy(), cmap="gray", vmin=low, vmax=high)
            bare(ax)
    names = ("digit", "what is shown", "filled in", "prediction\nof all patches")
    for ax, name in zip(grid[:, 0], names, strict=True):
        ax.set_ylabel(name, fontsize=9)
    return figure


def learning(fit: Fit, blank: float, probes: dict[str, float]) -> Figure:
    """Draw training loss and test error by step, and the accuracies of the probes."""
    figure, ((curve, bars),) = axes(11.5, 3.8, 1, 2, width_ratios=(1, 1.1))
    curve.plot(*smoothed(fit.losses, 60), color=BLUE, alpha=0.6, label="training")
    steps, errors = zip(*fit.watched, strict=True)
    curve.plot(steps, errors, "o-", color=ORANGE, markersize=4, label="test")
    curve.axhline(blank, color=GREY, linestyle="--", linewidth=1, label="mean training digit")
    curve.set(xlabel="step", ylabel="squared error on removed patches", ylim=(0, None))
    curve.legend(frameon=False, fontsize=8)
    for index, (name, value) in enumerate(probes.items()):
        colour = GREY if name == "pixels" else SKY if "untrained" in name else BLUE
        bars.barh(index, value, color=colour)
        bars.text(value, index, f" {value:.3f}", va="center", fontsize=8)
    # Room beyond 1 for the number beside the bar.
    bars.set(xlabel="test accuracy of a linear probe", xlim=(0, 1.12), xticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    bars.set(yticks=range(len(probes)))
    bars.set_yticklabels(list(probes), fontsize=8)
    bars.invert_yaxis()
    return figure
