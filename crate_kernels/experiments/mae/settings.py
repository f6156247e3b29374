"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MAESettings:
    """The model, its training without labels, and the probe.

    Attributes:
        dim, depth, heads: of the encoder, and of the decoder. lambd: of ISTA's l1 norm.
        mask_ratio: share of the patches that is removed.
        steps, batch_size, rate, warmup, weight_decay: of the training, by AdamW on moved digits.
        strengths: the probe's regularisation, 1 / C, chosen by held-out training digits, for features and pixels alike.
        shown: the digits that are drawn, the first test image of each.
    """

    dim: int = 96
    depth: int = 3
    heads: int = 4
    lambd: float = 0.5
    mask_ratio: float = 0.75
    steps: int = 1500
    batch_size: int = 100
    rate: float = 4e-3
    warmup: int = 50
    weight_decay: float = 0.05
    strengths: tuple[float, ...] = (1e2, 1e3)
    shown: tuple[int, ...] = (0, 2, 3, 4, 5, 7, 8)


PRESETS = {
    "default": MAESettings(),
    # CRATE-MAE-Base with the published rate, decay, 40 epochs of warm-up and 800 in all; ImageNet is not here.
    "paper": MAESettings(dim=768, depth=12, heads=12, steps=32_000, rate=3e-5, warmup=1600, weight_decay=0.1),
    "quick": MAESettings(dim=16, depth=1, heads=2, steps=4, batch_size=32, warmup=2, strengths=(1e3,), shown=(2, 7)),
}
