"""The figures. Each function draws one and returns it, without pyplot's global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from crate_kernels.bench.drawing import BLUE, GREY, ORANGE, axes, bare, colour_bar, whole_numbers
from crate_kernels.experiments.demo.compare import Agreement, Cost
from crate_kernels.experiments.demo.training import Training
from crate_kernels.experiments.demo.whitebox import DigitAttention, Layers

_FUSED, _NAIVE, _THIRD = BLUE, ORANGE, GREY


def learning(training: Training, neighbours: float) -> Figure:
    """Draw the loss of each step, and the test accuracy beside that of nearest neighbours."""
    figure, ((loss, accuracy),) = axes(9, 3.4, 1, 2)
    losses = torch.tensor(training.losses)
    window = max(1, min(40, len(losses) // 10))
    smooth = losses.unfold(0, window, 1).mean(-1)
    loss.plot(range(1, len(losses) + 1), losses, color=_FUSED, alpha=0.25, linewidth=0.8, label="each step")
    first = 1 + (window - 1) / 2  # place each mean in the middle of its window
    loss.plot(first + np.arange(len(smooth)), smooth, color=_FUSED, label=f"mean of {window} steps")
    loss.set(xlabel="step", ylabel="training loss (smoothed labels)")
    loss.legend(frameon=False)
    steps, values = zip(*training.watched, strict=True)
    accuracy.plot(steps, values, color=_FUSED, marker=".", label="CRATE")
    accuracy.axhline(neighbours, color=_THIRD, linestyle="--", label="3 nearest neighbours, on pixels")
    accuracy.set(xlabel="step", ylabel="test accuracy", ylim=(max(0.0, min(*values, neighbours) - 0.02), 1))
    accuracy.legend(frameon=False, loc="lower right")
    return figure


def same_model(result: Agreement, backend: str) -> Figure:
    """Draw both loss curves, and their difference beside the effect of rounding alone."""
    figure, ((curves, apart),) = axes(9, 3.4, 1, 2)
    steps = range(1, len(result.naive) + 1)
    curves.plot(steps, result.naive, color=_NAIVE, linewidth=4, alpha=0.5, label="naive equations")
    curves.plot(steps, result.fused, color=_FUSED, linewidth=1.2, label=backend)
    curves.set(xlabel="step", ylabel="training loss")
    curves.legend(frameon=False)
    apart.plot(steps, result.bound, color=_THIRD, label="bound")
    apart.plot(steps, result.noise, "--", color=_NAIVE, label="naive: rounding alone")
    apart.plot(steps, result.differences, ".-", color=_FUSED, label=f"{backend} − naive")
    # Linear near zero: many steps agree to the last bit.
    apart.set_yscale("symlog", linthresh=1e-7)
    apart.set_ylim(0, 100 * max(result.bound))  # headroom for the legend
    apart.set(xlabel="step", ylabel="difference of losses")
    apart.legend(frameon=False, loc="upper left")
    whole_numbers(curves, apart)
    return figure


def cost(found: list[Cost], backend: str) -> Figure:
    """Draw seconds and memory of a training step, naive and fused, by tokens per image."""
    figure, ((seconds, memory),) = axes(9, 3.4, 1, 2)
    names = [f"{c.tokens} tokens\npatch {c.patch_size}\nbatch {c.batch_size}" for c in found]
    for ax, label, values in (
        (seconds, "milliseconds a step", [[1e3 * s for s in c.seconds] for c in found]),
        (memory, "peak memory of a step (MiB)", [[b / 2**20 for b in c.peak_bytes] for c in found]),
    ):
        places = np.arange(len(found))
        for shift, side, name, colour in ((-0.2, 0, "naive", _NAIVE), (0.2, 1, backend, _FUSED)):
            bars = ax.bar(places + shift, [v[side] for v in values], 0.38, label=name, color=colour)
            ax.bar_label(bars, fmt="%.0f", fontsize=8)
        ax.set(xticks=places, xticklabels=names, ylabel=label)
        ax.legend(frameon=False, loc="upper left")
    return figure


def layers(seen: Mapping[str, dict[str, Any]], colours: Sequence[Any] = (_THIRD, _FUSED)) -> Figure:
    """Draw compression and sparsification layer by layer, one deviation around, from named summaries of ``Layers``."""
    figure, ((rate, nonzeros),) = axes(9.5, 3.6, 1, 2)
    for (name, summary), colour in zip(seen.items(), colours, strict=True):
        for ax, key in ((rate, "coding_rate"), (nonzeros, "nonzeros")):
            mean, spread = np.array(summary[key]), np.array(summary[f"{key}_std"])
            numbers = range(1, len(mean) + 1)
            ax.plot(numbers, mean, "o-", color=colour, markersize=4, label=name)
            ax.fill_between(numbers, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
    rate.set(xlabel="layer", ylabel="coding rate $R^c$ after MSSA (nats)", ylim=(0, None))
    nonzeros.set(xlabel="layer", ylabel="share of nonzeros after ISTA", ylim=(0, None))
    whole_numbers(rate, nonzeros)
    figure.legend(*rate.get_legend_handles_labels(), frameon=False, loc="outside right center")
    return figure


def coherence(before: Layers, after: Layers, dim: int) -> Figure:
    """Draw how much the subspaces of a layer's heads overlap, and the learned directions themselves."""
    depth, heads = before.coherence.shape[:2]
    figure, grid = axes(2.3 * depth + 1.2, 7.4, 3, depth)
    rank = before.gram.shape[-1] // heads
    for row, (name, values) in enumerate(
        (("before", before.coherence), ("after", after.coherence), ("after", after.gram))
    ):
        for layer, ax in enumerate(grid[row]):
            ax.imshow(values[layer].numpy(), cmap="magma", vmin=0, vmax=1)
            ax.spines[:].set_visible(False)
            if row == 2:
                ticks = [rank * head - 0.5 for head in range(heads + 1)]
                names = [f"{t + 0.5:.0f}" for t in ticks]
                ax.set(xticks=ticks, yticks=ticks, xlabel="direction", xticklabels=names, yticklabels=names)
            else:
                ticks, names = range(heads), range(1, heads + 1)
                ax.set(xticks=ticks, yticks=ticks, xlabel="head", xticklabels=names, yticklabels=names)
                for i in range(heads):
                    for j in range(heads):
                        value = values[layer, i, j].item()
                        ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7,
                                color="black" if value > 0.6 else "white")  # fmt: skip
            if row == 0:
                ax.set_title(f"layer {layer + 1}")
            if layer == 0:
                ax.set_ylabel(f"{name}\n{'direction' if row == 2 else 'head'}")
        label = "absolute cosine" if row == 2 else f"overlap (random: {rank / dim:.2f})"
        colour_bar(figure, grid[row], label)
    return figure


def attention(seen: DigitAttention) -> Figure:
    """Draw the attention of the last layer's class token to each patch, head by head."""
    digits, heads = seen.itself.shape
    figure, grid = axes(1.6 * (heads + 1) + 1, 1.75 * digits, digits, heads + 1)
    side = seen.images.shape[-1]
    top = seen.patches.max().item()
    for digit, row in enumerate(grid):
        picture = seen.images[digit].numpy()
        row[0].imshow(picture, cmap="gray", extent=(0, side, side, 0))
        row[0].set_ylabel(f"digit {seen.labels[digit]},\nread as {seen.predictions[digit]}")
        for head, ax in enumerate(row[1:]):
            ax.imshow(seen.patches[digit, head].numpy(), cmap="viridis", vmin=0, vmax=top, extent=(0, side, side, 0))
            middle = (picture.max() + picture.min()) / 2
            ax.contour(picture, levels=[middle], colors="white", linewidths=0.8, extent=(0, side, 0, side))
            ax.set_xlabel(f"to itself {seen.itself[digit, head]:.2f}", fontsize=8)
            if digit == 0:
                ax.set_title(f"head {head + 1}")
        for ax in row:
            bare(ax)
    colour_bar(figure, grid[:, 1:], "attention of the class token to a patch", top, cmap="viridis", shrink=0.5)
    return figure
