"""The figure of ``language``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from crate_kernels.bench.drawing import CYCLE, axes, smoothed
from crate_kernels.experiments.common.fit import Fit


def language(fits: Sequence[Fit]) -> Figure:
    """Draw the losses by step, in bits per byte: in training, and on the test text."""
    figure, ((training, test),) = axes(10.5, 3.8, 1, 2, sharey=True)
    for fit, colour in zip(fits, CYCLE, strict=True):
        steps, nats = smoothed(fit.losses, 60)
        training.plot(steps, nats / math.log(2), color=colour, linewidth=1.2, label=fit.label)
        steps, bits = zip(*fit.watched, strict=True)
        test.plot(steps, bits, "o-", color=colour, markersize=3, label=f"{fit.label}: {bits[-1]:.2f}")
    # Untrained models are at 8 bits per byte: leave out the first fall.
    last = max(fit.watched[-1][1] for fit in fits)
    training.set(xlabel="step", ylabel="bits a byte", title="training", ylim=(None, max(5.0, 1.02 * last)))
    test.set(xlabel="step", title="test")
    test.legend(frameon=False, fontsize=8)
    return figure
