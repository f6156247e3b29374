"""The figure of ``language``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

from crate_kernels.bench.drawing import CYCLE, axes
from crate_kernels.experiments.common.fit import Fit


def language(fits: Sequence[Fit]) -> Figure:
    """Draw the losses by step, in bits per byte: in training, and on the test text."""
    figure, ((training, test),) = axes(10.5, 3.8, 1, 2, sharey=True)
    for fit, colour in zip(fits, CYCLE, strict=True):
        window = max(1, len(fit.losses) // 60)
        means = torch.tensor(fit.losses).unfold(0, window, window).mean(-1) / math.log(2)
        training.plot(window * (torch.arange(len(means)) + 0.5), means, color=colour, linewidth=1.2, label=fit.label)
        steps, bits = zip(*fit.watched, strict=True)
        test.plot(steps, bits, "o-", color=colour, markersize=3, label=f"{fit.label}: {bits[-1]:.2f}")
    # Untrained models are at 8 bits per byte: leave out the first fall.
    training.set(xlabel="step", ylabel="bits a byte", title="training", ylim=(None, max(5.0, 1.02 * _last(fits))))
    test.set(xlabel="step", title="test")
    test.legend(frameon=False, fontsize=8)
    return figure


def _last(fits: Sequence[Fit]) -> float:
    """Return the largest final test loss of the models, in bits per byte."""
    return max(fit.watched[-1][1] for fit in fits)
