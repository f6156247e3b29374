"""Linear layers whose products on CPUs are the faster ones of ``_core/products.py``."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from crate_kernels._core import autograd, op_checks, operator, products
from crate_kernels._core.products import product

_OURS = (None, "cpp")  # the backends that may take other products than PyTorch's


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    op_checks.floating("linear backward", "weight", weight, 2)
    rows = x.shape[:-1]
    op_checks.tensor("linear backward", "x", x, weight.dtype, (*rows, weight.shape[1]), weight.device)
    op_checks.tensor("linear backward", "dy", dy, weight.dtype, (*rows, weight.shape[0]), weight.device)
    g = dy.reshape(-1, weight.shape[0])
    dx = product(g, weight.t()).view(x.shape) if need_dx else x.new_empty(0)
    dweight = product(g.t(), x.reshape(-1, weight.shape[1]).t()) if need_dweight else x.new_empty(0)
    return dx, dweight, g.sum(0) if need_dbias else x.new_empty(0)


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if need_dx else 0),
        x.new_empty(weight.shape if need_dweight else 0),
        x.new_empty(weight.shape[0] if need_dbias else 0),
    )


def _flops(x_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> int:
    return 2 * prod(x_shape) * weight_shape[0]


_forward_op = operator.define(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    product,
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    flops=lambda x, weight, bias, **_: _flops(x, weight),
)
_backward_op = operator.define(
    "linear_bwd(Tensor dy, Tensor x, Tensor weight, bool need_dx, bool need_dweight, bool need_dbias)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    flops=lambda dy, x, weight, need_dx, need_dweight, *_, **__: (need_dx + need_dweight) * _flops(x, weight),
)


@autograd.traced_by_autograd
class _LinearFunction(torch.autograd.Function):
    """y = x weight^T + bias, differentiable in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = _forward_op(x, weight, bias)
        _LinearFunction.save(ctx, (x, weight, bias), y)
        return y

    @staticmethod
    def save(ctx: Any, inputs: tuple, y: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = autograd.saved_tensors("linear", ctx)
        needs = ctx.needs_input_grad
        if operator.is_traced() or (not torch.is_grad_enabled() and operator.is_plain(dy)):
            return tuple(
                g if need else None for g, need in zip(_backward_op(dy, x, weight, *needs), needs, strict=True)
            )
        # A gradient that is differentiated again, or mapped over: PyTorch's products know how.
        rows = dy.reshape(-1, dy.shape[-1])
        return (
            dy @ weight if needs[0] else None,
            rows.mT @ x.reshape(-1, x.shape[-1]) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


autograd.functorch_twin(_LinearFunction, _forward_op)
autograd.differentiate(_forward_op, _LinearFunction)


def linear(layer: Any, x: Tensor, backend: str | None) -> Tensor:
    """Return ``layer(x)``; a plain ``nn.Linear`` on a CPU takes the faster product, and in 16 bits the faster dtype.

    A layer of another type, or one that hooks watch, is called as it is: tools that look for ``nn.Linear`` by its exact
    type find it, and what they put in its place runs.

    Args:
        layer: a module from (..., in_features) to (..., out_features).
        x: (..., in_features).
        backend: None or "cpp" for the faster product.
    """
    if type(layer) is nn.Linear and _takes_other_product(layer, x, backend):
        weight, bias = layer.weight, layer.bias
        if autograd.needs_grad(x, weight, bias):
            return autograd.apply(_LinearFunction, x, weight, bias)
        return _forward_op(x, weight, bias)
    return layer(x)


def sequence(layers: Any, x: Tensor, backend: str | None) -> Tensor:
    """Return ``layers(x)``, whose linear layers are applied as by ``linear`` if it is a plain ``nn.Sequential``."""
    if type(layers) is not nn.Sequential or not _is_unwatched(layers):
        return layers(x)
    for layer in layers:
        x = linear(layer, x, backend)
    return x


def _is_unwatched(layer: nn.Module) -> bool:
    """Return whether a call of a module is a call of its class's ``forward`` and nothing else."""
    return not (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__  # accelerate's hooks
        or layer._compiled_call_impl is not None
        or module._has_any_global_hook()
    )


def _takes_other_product(layer: nn.Linear, x: Tensor, backend: str | None) -> bool:
    """Return whether the product of ``_core/products.py`` can serve this call and is faster."""
    if not isinstance(x, Tensor) or not x.is_cpu or backend not in _OURS:  # torch.fx passes a proxy
        return False
    compiling = torch.compiler.is_compiling()
    if not compiling and products.is_small(x, layer.out_features):  # at once: a parameter takes long to look up
        return False
    weight = layer.weight
    if x.dtype != weight.dtype or not weight.is_cpu or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if not _is_unwatched(layer):
        return False
    if compiling:
        seen = torch.is_autocast_enabled("cpu") or operator.is_wrapper(x) or operator.is_wrapper(weight)
        return products.may_reroute(x.dtype) and not seen
    return products.should_reroute(x, weight, layer.bias) and operator.is_plain(x, weight)
