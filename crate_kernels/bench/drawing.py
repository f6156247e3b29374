"""Makes figures in one style, without pyplot's global state."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREY, GREEN, PINK, SKY = "#0072b2", "#d55e00", "#555555", "#009e73", "#cc79a7", "#56b4e9"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)


def axes(width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    """Return a figure and its (rows, columns) axes."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    made = figure.subplots(rows, columns, squeeze=False, **kwargs)
    for ax in made.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, made


def bare(ax: Any) -> None:
    """Remove ticks and frame."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def whole_numbers(*drawn: Any) -> None:
    """Label the x axes with integers only: layers, steps, examples."""
    for ax in drawn:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def colour_bar(figure: Figure, beside: Any, label: str, top: float = 1.0, **style: Any) -> None:
    """Draw the scale of pictures whose colours run from 0 to ``top``."""
    scale = ScalarMappable(Normalize(0, top), style.pop("cmap", "magma"))
    figure.colorbar(scale, ax=beside, label=label, **{"shrink": 0.9, **style})


def smoothed(values: Sequence[float], parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of about ``parts`` equal parts of a series, and the middle of each part as a step."""
    window = max(1, len(values) // parts)
    means = np.array(values[: len(values) // window * window]).reshape(-1, window).mean(1)
    return window * (np.arange(len(means)) + 0.5), means


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
