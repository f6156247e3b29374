"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayersSettings:
    """The model, its training, and the epochs of its measurements.

    Attributes:
        dim, depth, heads, dim_head: of the CRATE, trained as in the demo.
        weight_decay: of the matrices. The published command (200 epochs of ImageNet) shrinks a weight that gets no
            gradient by e^2.3 (CRATE's repository, README); the default here, of 480 steps, by e^2.2.
        epochs: of the training. looks: epochs after which it is measured, 0 for before the first.
        shown: the digits whose tokens are drawn, the first test image of each.
    """

    dim: int = 96
    depth: int = 12
    heads: int = 4
    dim_head: int = 24
    epochs: int = 12
    batch_size: int = 100
    learning_rate: float = 3e-3
    weight_decay: float = 3.0
    looks: tuple[int, ...] = (0, 2, 4, 8, 12)
    shown: tuple[int, ...] = (0, 2, 3, 5, 7, 8)


PRESETS = {
    "default": LayersSettings(),
    # CRATE-Tiny and its number of epochs, but not the paper's images (ImageNet) or optimiser (Lion). Weight decay
    # has the published effect, e^2.3, in these 6,000 steps.
    "paper": LayersSettings(
        dim=384,
        depth=12,
        heads=6,
        dim_head=64,
        epochs=150,
        learning_rate=5e-4,
        weight_decay=1.5,
        looks=(0, 1, 5, 15, 50, 150),
    ),
    "quick": LayersSettings(dim=16, depth=2, heads=2, dim_head=8, epochs=1, batch_size=400, looks=(0, 1), shown=(2, 7)),
}
