"""The experiment: train, measure at chosen epochs, draw the internals."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from crate_kernels.bench.drawing import axes, bare, colour_bar
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import data
from crate_kernels.experiments.demo.figures import layers
from crate_kernels.experiments.demo.settings import DemoSettings
from crate_kernels.experiments.demo.training import Training
from crate_kernels.experiments.layers import watching
from crate_kernels.experiments.layers.settings import LayersSettings
from crate_kernels.experiments.layers.watching import WatchedTokens


def run(trial: Trial, settings: LayersSettings) -> int:
    """Train, measure and draw."""
    digits = data.load()
    training = Training(training_settings(settings, trial.seed), digits, trial.backend, trial.device)
    trial.say(f"{digits.name}; a CRATE of {settings.depth} layers, backend {training.fused}")
    seen = watching.train(training, trial, settings.looks)
    tokens = watching.tokens(training, digits, settings.shown)
    first, last = seen[min(seen)], seen[max(seen)]
    trial.compare(
        [
            ["test accuracy", "-", f"{first['accuracy']:.4f} before, {last['accuracy']:.4f} after training"],
            ["coding rate Rc by layer, before training", "-", _series(first["coding_rate"], 1)],
            ["  after training", "-", _series(last["coding_rate"], 1)],
            ["  layers at which it falls", "2, 4, 5, 8-12 of 2-12", _falls(last["coding_rate"])],
            ["nonzeros by layer, before training", "-", _series(first["nonzeros"], 3)],
            ["  after training", "0.41, 0.48, .. 0.20, 0.34", _series(last["nonzeros"], 3)],
            ["  layers at which they fall", "3, 4, 6-11 of 2-12", _falls(last["nonzeros"])],
            ["what MSSA adds, over the tokens, before training", "-", _series(first["added_by_mssa"], 2)],
            ["  after training", "-", _series(last["added_by_mssa"], 2)],
            [
                "overlap of two heads' subspaces, mean over layers",
                "small",
                f"{fmean(last['coherence_between_heads']):.2f} (random: {settings.dim_head / settings.dim:.2f})",
            ],
        ]
    )
    trial.write(
        {
            "epochs": _draw_epochs(seen),
            "heatmaps": _draw_heatmaps(tokens),
            "subspaces": _draw_subspaces(tokens, settings.heads),
            "principal": _draw_principal(tokens),
        },
        {"digits": digits.name, "epochs": seen, "principal_components_explain": tokens.explained},
        settings,
    )
    return 0


def training_settings(settings: LayersSettings, seed: int) -> DemoSettings:
    """Return the demo's training settings with another size and length."""
    own = ("epochs", "batch_size", "learning_rate", "weight_decay", "dim", "depth", "heads", "dim_head")
    return DemoSettings(seed=seed, **{name: getattr(settings, name) for name in own})


def _series(values: list[float], places: int) -> str:
    return ", ".join(f"{value:.{places}f}" for value in values)


def _falls(values: list[float]) -> str:
    falls = [index + 2 for index in range(len(values) - 1) if values[index + 1] < values[index]]
    return f"{', '.join(str(layer) for layer in falls) or 'none'} of 2-{len(values)}"


def _draw_epochs(seen: dict[int, dict[str, Any]]) -> Figure:
    """Draw coding rate and nonzeros by layer, one line per measured epoch."""
    colours = matplotlib.colormaps["viridis_r"]([(index + 0.5) / len(seen) for index in range(len(seen))])
    names = {epoch: f"epoch {epoch}" if epoch else "before training" for epoch in sorted(seen)}
    return layers({name: seen[epoch] for epoch, name in names.items()}, list(colours))


def _draw_heatmaps(seen: WatchedTokens) -> Figure:
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


def _draw_subspaces(seen: WatchedTokens, heads: int) -> Figure:
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


def _draw_principal(seen: WatchedTokens) -> Figure:
    """Draw each digit, and beside it the first three principal components of its tokens as red, green and blue.

    Above a column are its layer and the share of the variance that the three components have.
    """
    depth, digits = seen.colours.shape[:2]
    figure, grid = axes(1.35 * (depth + 1), 1.4 * digits + 0.4, digits, depth + 1)
    for digit, row in enumerate(grid):
        row[0].imshow(seen.images[digit].numpy(), cmap="gray")
        for layer, ax in enumerate(row[1:]):
            ax.imshow(seen.colours[layer, digit].numpy(), interpolation="nearest")
            if digit == 0:
                ax.set_title(f"{layer + 1}\n{100 * seen.explained[layer]:.0f}%", fontsize=17)
        for ax in row:
            bare(ax)
    return figure
