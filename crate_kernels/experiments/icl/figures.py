"""The figures of ``icl``."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from crate_kernels.bench.drawing import CYCLE, GREY, axes, smoothed, whole_numbers


def error(found: dict[str, dict[str, Any]]) -> Figure:
    """Draw the error against the number of examples, beside that of least squares."""
    figure, (row,) = axes(4.8 * len(found), 3.8, 1, len(found), sharey=True)
    for ax, (task, result) in zip(row, found.items(), strict=True):
        for (name, values), style in zip(result["floors"].items(), ("--", ":"), strict=False):
            ax.plot(range(len(values)), values, style, color=GREY, label=name)
        for (name, values), colour in zip(result["models"].items(), CYCLE, strict=False):
            style = "o--" if name == "transformer" else "o-"  # dashed: it may lie on another line
            ax.plot(range(len(values)), values, style, markersize=3, color=colour, label=name)
        # The minimum-norm solution of nearly as many examples as unknowns can be far off: it may leave the figure.
        ax.set(title=f"{task} regression", xlabel="examples in context", ylim=(-0.05, 1.6))
        whole_numbers(ax)
        ax.legend(frameon=False, fontsize=8)
    row[0].set_ylabel("squared error / variance of the answers")
    return figure


def learning(found: dict[str, dict[str, Any]]) -> Figure:
    """Draw the training losses, each a mean over a hundredth of the steps."""
    figure, (row,) = axes(4.8 * len(found), 3.4, 1, len(found))
    for ax, (task, result) in zip(row, found.items(), strict=True):
        for (name, losses), colour in zip(result["losses"].items(), CYCLE, strict=False):
            ax.plot(*smoothed(losses, 100), color=colour, label=name)
        ax.set(title=f"{task} regression", xlabel="step", ylabel="training loss", ylim=(0, None))
        ax.legend(frameon=False, fontsize=8)
    return figure
