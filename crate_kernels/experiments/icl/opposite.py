"""MSSA of which half of the heads attend to what is opposite: an ablation that no paper has.

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


def turn(model: nn.Module) -> None:
    """Turn the sign of the scores in every second head of each MSSA; the parameters stay as they are."""
    for module in model.modules():
        if isinstance(module, MSSA):
            cast(Any, module)._operator = _every_second_turned


def _every_second_turned(w: Tensor, *, scale: float, **options: Any) -> Tensor:
    """Return ``softmax(-scale w w^T) w`` for heads 0, 2, .. and ``softmax(scale w w^T) w`` for heads 1, 3, .."""
    turned, kept = mssa(w[:, ::2], scale=-scale, **options), mssa(w[:, 1::2], scale=scale, **options)
    return torch.stack((turned, kept), 2).flatten(1, 2)
