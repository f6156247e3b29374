"""Prompts: examples of a linear function, drawn anew per prompt (Garg et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from crate_kernels.experiments.common.draws import generator
from crate_kernels.experiments.icl.settings import ICLSettings


def draw(settings: ICLSettings, task: str, count: int, *purpose: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw xs (count, examples, dims) and weights (count, dims), standard normal; return xs, ``xs . w`` and w.

    In a sparse prompt all but ``nonzeros`` weights are zero; their places are drawn without replacement.
    """
    draws = generator(*purpose)
    xs = torch.randn(count, settings.examples, settings.dims, generator=draws)
    weights = torch.randn(count, settings.dims, generator=draws)
    if task == "sparse":
        order = torch.rand(count, settings.dims, generator=draws).argsort(-1)
        weights = weights.where(order < settings.nonzeros, 0.0)
    return xs, torch.einsum("nkd,nd->nk", xs, weights), weights


def least_squares(xs: Tensor, ys: Tensor) -> Tensor:
    """Predict each answer, (count, examples), from the examples before it by least squares of smallest norm.

    The prediction is exact from as many examples as dimensions. No method does better on dense weights.
    """
    xs, ys = xs.double(), ys.double()
    found = [torch.zeros(len(xs), dtype=torch.float64, device=xs.device)]
    for seen in range(1, xs.shape[1]):
        weights = torch.linalg.pinv(xs[:, :seen]) @ ys[:, :seen, None]
        found.append((xs[:, seen, None] @ weights).flatten())
    return torch.stack(found, 1)


def knowing_the_support(xs: Tensor, ys: Tensor, weights: Tensor) -> Tensor:
    """Predict like ``least_squares``, knowing which weights are nonzero: no method has less error on sparse ones."""
    return least_squares(xs * (weights != 0).unsqueeze(1), ys)


def errors(predictions: Tensor, ys: Tensor, variance: float) -> list[float]:
    """Return the mean squared error after 0, 1, .. examples, over the variance of the answers."""
    return ((predictions.double() - ys.double()).square().mean(0) / variance).tolist()
