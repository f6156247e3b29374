"""The figures of ``layers``."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from crate_kernels.bench.drawing import axes, bare, colour_bar
from crate_kernels.experiments.demo.figures import layers
from crate_kernels.experiments.layers.watching import Tokens


def epochs(seen: dict[int, dict[str, Any]]) -> Figure:
    """Draw coding rate and nonzeros by layer, one line per measured epoch."""
    colours = matplotlib.colormaps["viridis_r"]([(index + 0.5) / len(seen) for index in range(len(seen))])
    names = {epoch: f"epoch {epoch}" if epoch else "before training" for epoch in sorted(seen)}
    return layers({name: seen[epoch] for epoch, name in names.items()}, list(colours))


def heatmaps(seen: Tokens) -> Figure:
    """Draw the code of each token of one digit, in every layer."""
    depth = len(seen.codes)
    figure, (row,) = axes(2.1 * depth + 1, 3.4, 1, depth)
    for layer, ax in enumerate(row):
        codes = seen.codes[layer].abs()
        # One scale per layer: layers differ by more than a colour bar can show.
        ax.imshow((codes / codes.max().clamp(min=1e-12)).numpy(), cmap="magma", aspect="auto", vmin=0, vmax=1)
        share = float((seen.codes[layer] != 0).double().mean())
        ax.set_title(f"layer {layer + 1}\n{100 * share:.0f}% nonzero", fontsize=10)
        ax.set_xlabel("channel")
        if layer == 0:
            ax.set_ylabel(f"token (digit {seen.labels[0]})")
        else:
            ax.set_yticks([])
    colour_bar(figure, row, "code / largest of the layer")
    return figure


def subspaces(seen: Tokens, heads: int) -> Figure:
    """Draw ``|[U_1 .. U_K]^T [U_1 .. U_K]|`` of every layer, with columns of unit norm."""
    depth, size = seen.gram.shape[:2]
    columns = min(depth, 6)
    rows = -(-depth // columns)
    figure, grid = axes(2.3 * columns + 1, 2.6 * rows, rows, columns)
    ticks = [size // heads * head - 0.5 for head in range(heads + 1)]
    for layer, ax in enumerate(grid.flat):
        if layer >= depth:
            ax.set_visible(False)
            continue
        ax.imshow(seen.gram[layer].numpy(), cmap="magma", vmin=0, vmax=1)
        ax.set(title=f"layer {layer + 1}", xticks=ticks, yticks=ticks, xticklabels=[], yticklabels=[])
    colour_bar(figure, grid, "absolute cosine; a block is a head")
    return figure


def principal(seen: Tokens) -> Figure:
    """Draw each digit, and beside it the first three principal components of its tokens as red, green and blue."""
    depth, digits = seen.colours.shape[:2]
    figure, grid = axes(1.35 * (depth + 1), 1.4 * digits + 0.4, digits, depth + 1)
    for digit, row in enumerate(grid):
        row[0].imshow(seen.images[digit].numpy(), cmap="gray")
        for layer, ax in enumerate(row[1:]):
            ax.imshow(seen.colours[layer, digit].numpy(), interpolation="nearest")
            if digit == 0:
                ax.set_title(f"layer {layer + 1}\n{100 * seen.explained[layer]:.0f}% of variance", fontsize=8)
        for ax in row:
            bare(ax)
    return figure
