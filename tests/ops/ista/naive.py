"""Proximal steps of sparse coding, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def _prox(value: Tensor, bias: float, nonnegative: bool) -> Tensor:
    """The proximal map of ``bias |.|_1``, channel by channel, with or without the constraint ``>= 0``."""
    zero = torch.zeros_like(value[0])
    shrunk = []
    for v in value:
        positive, negative = v > bias, v < -bias and not nonnegative
        shrunk.append(v - bias if positive else v + bias if negative else zero)
    return torch.stack(shrunk)


def ista_loop(x: Tensor, weight: Tensor, *, step_size: float, lambd: float, nonnegative: bool = True) -> Tensor:
    """Step once: ``relu(x + eta (D^T x - D^T D x) - eta lambda)`` (CRATE), in three products.

    ``nonnegative=False`` soft-thresholds both signs instead (CRATE Eq. 116-117).
    """
    outs = []
    for token in x.reshape(-1, x.shape[-1]):
        gradient = weight.T @ token - weight.T @ (weight @ token)
        outs.append(_prox(token + step_size * gradient, step_size * lambd, nonnegative))
    return torch.stack(outs).view(x.shape)


def ista_overcomplete_loop(
    x: Tensor, weight: Tensor, decoder: Tensor | None = None, *, step_size: float, lambd: float, steps: int
) -> Tensor:
    """Code in an overcomplete dictionary and decode (CRATE-alpha): ``out = D1 z_steps``, from ``z_0 = 0``.

    ``z <- relu(z + eta D^T (x - D z) - eta lambda)`` with D (dim, hidden); ``decoder=None`` ties D1 = D.
    """
    outs = []
    for token in x.reshape(-1, x.shape[-1]):
        code = weight.new_zeros(weight.shape[1])
        for _ in range(steps):
            residual = token - weight @ code
            code = _prox(code + step_size * (weight.T @ residual), step_size * lambd, nonnegative=True)
        outs.append((weight if decoder is None else decoder) @ code)
    return torch.stack(outs).view(x.shape)
