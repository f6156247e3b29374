"""Coding rate of the samples of each class, as PyTorch's operators and as one op.

How many classes there are and how large the largest is, only the labels' values say. Neither ``torch.compile`` nor
``vmap`` can read these, so that both get an op. It returns the gradient with the rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, operator

from ._factors import factors


def _by_class(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return z (samples, dim) as (classes, largest, dim), with zeros, which have no rate; the sizes; and the places.

    Places are the samples' order, their classes and their rows in these.
    """
    _, index, counts = labels.unique(return_inverse=True, return_counts=True)
    order = index.argsort(stable=True)
    first = (counts.cumsum(0) - counts)[index[order]]
    row = torch.arange(len(z), device=z.device) - first
    padded = z.new_zeros(len(counts), int(counts.max()), z.shape[1]).index_put((index[order], row), z[order])
    return padded, counts.to(z.dtype), (order, index[order], row)


def _roots(sizes: Tensor, dim: int, eps_squared: float) -> Tensor:
    return (dim / (sizes * eps_squared)).sqrt()[:, None, None]


def _log_determinants(r: Tensor) -> Tensor:
    return r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


def class_rate(op: str, z: Tensor, labels: Tensor, eps_squared: float) -> Tensor:
    """Return Rc of float64 z (samples, dim)."""
    if torch.compiler.is_compiling() or operator.is_mapped():
        return _ClassRate.apply(z, labels, eps_squared, op)[0]
    padded, sizes, _ = _by_class(z, labels)
    *_, r = factors(op, "z", padded, _roots(sizes, z.shape[1], eps_squared))
    return (sizes / len(z) * _log_determinants(r)).sum()


def _body(z: Tensor, labels: Tensor, eps_squared: float, op: str) -> tuple[Tensor, Tensor]:
    padded, sizes, (order, of, row) = _by_class(z, labels)
    roots, shares = _roots(sizes, z.shape[1], eps_squared), sizes / len(z)
    tokens, identity, r = factors(op, "z", padded, roots)
    # [root Z; I] = Q R, so that a Z (I + a Z^T Z)^-1 is root times the product of Q's parts.
    solved = tokens @ identity.mT if padded.shape[1] >= padded.shape[2] else identity @ tokens.mT
    gradient = torch.empty_like(z)
    gradient[order] = (shares[:, None, None] * roots * solved)[of, row]
    return (shares * _log_determinants(r)).sum(), gradient


_op = operator.define(
    "class_rate(Tensor z, Tensor labels, float eps_squared, str op) -> (Tensor, Tensor)",
    _body,
    lambda z, labels, eps_squared, op: (z.new_empty(()), torch.empty_like(z)),
)


class _ClassRate(torch.autograd.Function):
    """The op, differentiable once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, labels: Tensor, eps_squared: float, op: str) -> tuple[Tensor, Tensor]:
        return _op(z, labels, eps_squared, op)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.op = inputs[-1]
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, drate: Tensor, _: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        z, gradient = ctx.saved_tensors
        where = "under torch.compile or vmap; call it outside of them"
        return autograd.once_differentiable(ctx.op, drate * gradient, z, where=where), None, None, None
