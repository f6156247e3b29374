"""The figure of ``classify``."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from crate_kernels.bench.drawing import GREY, axes
from crate_kernels.experiments.common.fit import Fit


def classify(fits: Sequence[Fit], neighbours: float) -> Figure:
    """Draw test accuracy by step, and the last accuracy as bars in the colours of the lines."""
    figure, ((curves, bars),) = axes(12, 4.2, 1, 2)
    colours = matplotlib.colormaps["tab10"]
    for index, fit in enumerate(fits):
        steps, values = zip(*fit.watched, strict=True)
        curves.plot(steps, values, "o-", markersize=3, linewidth=1.2, color=colours(index))
        bars.barh(index, values[-1], color=colours(index))
        bars.text(0.01, index, f"{values[-1]:.3f}", va="center", color="white", fontsize=8)  # clear of the dashes
    for ax, line in ((curves, "axhline"), (bars, "axvline")):
        getattr(ax, line)(neighbours, color=GREY, linestyle="--", linewidth=1, label="3 nearest neighbours")
    curves.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    curves.legend(frameon=False, fontsize=8, loc="lower right")
    bars.set(xlabel="test accuracy after the last step", xlim=(0, 1), yticks=range(len(fits)))
    bars.set_yticklabels([fit.label for fit in fits], fontsize=8)
    bars.invert_yaxis()
    return figure
