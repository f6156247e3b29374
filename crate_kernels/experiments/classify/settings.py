"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClassifySettings:
    """The models and their training.

    Attributes:
        models: names in ``crate_kernels.experiments.classify.models.BUILDERS``; all of them if empty.
        dim, depth, heads, dim_head: of every model.
        epochs, batch_size, rate, warmup, weight_decay: of the training, by AdamW on moved digits as in the demo.
    """

    models: tuple[str, ...] = ()
    dim: int = 64
    depth: int = 3
    heads: int = 4
    dim_head: int = 16
    epochs: int = 8
    batch_size: int = 100
    rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.05


PRESETS = {
    "default": ClassifySettings(),
    # The width and depth of CRATE-Tiny and the paper's number of epochs, but not its images (ImageNet).
    "paper": ClassifySettings(dim=384, depth=12, heads=6, dim_head=64, epochs=150, rate=5e-4, warmup=200),
    "quick": ClassifySettings(dim=16, depth=1, heads=2, dim_head=8, epochs=1, batch_size=400, warmup=2),
}
