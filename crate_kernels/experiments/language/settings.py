"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageSettings:
    """The models, their training and their sampling.

    Attributes:
        layers, heads, dim: of every model. block: the longest context, in bytes.
        pieces: batches of ``batch_size`` per step, their gradients averaged.
        steps, batch_size, rate, warmup, weight_decay: of the training, by AdamW.
        sample: bytes that each model writes at the end. temperature: of the sampling.
    """

    layers: int = 3
    heads: int = 4
    dim: int = 96
    block: int = 96
    steps: int = 600
    batch_size: int = 16
    pieces: int = 1
    rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    sample: int = 300
    temperature: float = 0.8


PRESETS = {
    "default": LanguageSettings(),
    # GPT-2's base size, and nanoGPT's rate, steps and batch of 480, but not OpenWebText and its tokens.
    "paper": LanguageSettings(
        layers=12, heads=12, dim=768, block=1024, steps=600_000, batch_size=12, pieces=40, rate=6e-4, warmup=2000
    ),
    "quick": LanguageSettings(layers=1, heads=2, dim=16, block=16, steps=2, batch_size=4, warmup=1, sample=8),
}
