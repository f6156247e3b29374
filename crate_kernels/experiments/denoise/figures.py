"""The figures of ``denoise``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from crate_kernels.bench.drawing import CYCLE, GREY, axes, whole_numbers
from crate_kernels.experiments.denoise.settings import Mixture


def theorem(entries: Sequence[dict[str, Any]], backend: str) -> Figure:
    """Draw the SNR beside the theorem's line, and its departure from the line."""
    figure, ((curve, off),) = axes(10, 3.8, 1, 2)
    for entry, colour in zip(entries, CYCLE, strict=False):
        mixture: Mixture = entry["mixture"]
        assert mixture.threshold is not None
        means = entry["ratios"].mean((0, 2))
        layers = range(len(means))
        growth = 1 + mixture.eta * mixture.threshold
        name = f"N={mixture.tokens}, K={mixture.clusters}, p={mixture.rank}"
        curve.plot(layers, [means[0] * growth**layer for layer in layers], "--", color=colour, linewidth=1)
        curve.plot(layers, means, "o", color=colour, markersize=4, label=name)
        off.plot(layers[1:], entry["departure"][1:], "o-", color=colour, markersize=4, label=f"{name}, float64")
        rough = entry["kernel_departure"][1:]
        off.plot(layers[1:], rough, "x:", color=colour, markersize=5, label=f"{name}, float32 ({backend})")
        for ax in (curve, off):
            ax.axvline(mixture.exact + 0.5, color=colour, linewidth=0.8, alpha=0.4)
    curve.plot([], [], "--", color=GREY, linewidth=1, label=r"Theorem 3.1: $(1+\eta\tau)^\ell$")
    curve.plot([], [], color=GREY, linewidth=0.8, alpha=0.4, label="to its left, checked to rounding")
    curve.set(xlabel="layer", ylabel="SNR", yscale="log")
    off.set(xlabel="layer", ylabel="largest relative departure from the line", yscale="log")
    whole_numbers(curve, off)
    curve.legend(frameon=False, fontsize=8)
    off.legend(frameon=False, fontsize=8)
    return figure


def softmax(mixtures: Sequence[Mixture], found: Sequence[Tensor]) -> Figure:
    """Draw the SNR of every layer under softmax, one panel per form, the spread over draws and clusters shaded."""
    forms = list(dict.fromkeys(mixture.form for mixture in mixtures))
    noises = list(dict.fromkeys(mixture.noise for mixture in mixtures))
    figure, (panels,) = axes(3.6 * len(forms), 3.6, 1, len(forms), sharey=True)
    for mixture, ratios in zip(mixtures, found, strict=True):
        every = ratios.transpose(1, 2).flatten(0, 1)  # (draws * clusters, layers + 1)
        layers, colour = range(every.shape[1]), CYCLE[noises.index(mixture.noise)]
        ax = panels[forms.index(mixture.form)]
        ax.plot(layers, every.mean(0), "o-", color=colour, markersize=3, label=f"noise {mixture.noise}")
        ax.fill_between(layers, every.amin(0), every.amax(0), color=colour, alpha=0.2, linewidth=0)
        ax.set(xlabel="layer", title=f"softmax, {mixture.form}")
        whole_numbers(ax)
    panels[0].set(ylabel="SNR", ylim=(0, None))  # after all is drawn: setting a limit ends autoscaling
    panels[0].legend(frameon=False)
    return figure
