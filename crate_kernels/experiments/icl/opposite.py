"""MSSA whose heads 0, 2, .. have negated scores: an ablation that no paper has.

A head of MSSA scores two tokens by ``w_i . w_j``, which is largest for a token and itself: no choice of weights makes a
head prefer tokens unlike the query. Ordinary attention has such heads, and regression in context uses them in pairs
with others: the difference of the two is free of the mean of all answers (arXiv 2503.12734).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from crate_kernels.nn import MSSA
from crate_kernels.ops.mssa import mssa


def negate_every_second_head(model: nn.Module) -> None:
    """Negate the scores of every second head in each MSSA; the parameters stay as they are."""
    for module in model.modules():
        if isinstance(module, MSSA):
            cast(Any, module)._operator = _negated


def _negated(w: Tensor, *, scale: float, **options: Any) -> Tensor:
    """Return ``softmax(-scale w w^T) w`` for heads 0, 2, .. and ``softmax(scale w w^T) w`` for heads 1, 3, .."""
    negated, kept = mssa(w[:, ::2], scale=-scale, **options), mssa(w[:, 1::2], scale=scale, **options)
    return torch.stack((negated, kept), 2).flatten(1, 2)
