"""Sizes of the demo."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoSettings:
    """Settings that decide the outcome of a training run.

    Attributes:
        rotation: largest, in radians; ``scaling``: largest relative; ``shift``: largest, as a share of the side.
        warmup: steps over which the learning rate rises before its cosine decay.
    """

    seed: int = 0
    epochs: int = 27
    batch_size: int = 100
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    rotation: float = 0.15
    scaling: float = 0.1
    shift: float = 0.07
    dim: int = 128
    depth: int = 4
    heads: int = 4
    dim_head: int = 32


PRESETS = {"default": DemoSettings(), "quick": DemoSettings(epochs=1)}
