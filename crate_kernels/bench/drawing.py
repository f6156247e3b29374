"""Makes figures in one style, without pyplot's global state."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

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


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
