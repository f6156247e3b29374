"""The op boundary of sparse coding: schemas, fakes and the autograd.Functions.

Saved tensors are (x, weight, y): the mask of the backward is y itself. How many products a call
takes depends on the number of tokens and is decided inside the op, so compile never recompiles for it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import backends, operator

_OPTIONS = "float step_size, float lambd, bool nonnegative, ScalarType compute"
_STEPS = "float step_size, float lambd, int steps"


def _kernel(name: str) -> Any:
    of = 1 if name.startswith("backward") else 0  # where x is
    return lambda *args: backends.run("ista", name, args[-1], args[of], *args[:-1])


def _run_backward(dy: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Differentiate by the backend; where none was named, as composite does where that is as fast.

    With bfloat16 weights the cpp kernels spare no pass: they take 0.93-1.2 times as long for dim 192-768 and up to 6304
    tokens, on two AVX512-BF16 threads.
    """
    *rest, backend = args
    spared = weight.dtype != torch.bfloat16 or x.device.type != "cpu"
    if not spared and backend == backends.AUTO and backends.chosen("ista", backend, x) == "cpp":
        backend = "composite"
    return backends.run("ista", "backward", backend, x, dy, x, weight, *rest)


def _fake_ista_bwd(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_dx, need_dweight = rest[-3:-1]
    return x.new_empty(x.shape if need_dx else (0,)), weight.new_empty(weight.shape if need_dweight else (0,))


def _fake_overcomplete_fwd(
    x: Tensor, weight: Tensor, decoder: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    steps, keep = rest[2], rest[3]
    if not keep:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0)
    tokens, dim = prod(x.shape[:-1]), x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(steps, tokens, weight.shape[1]),
        x.new_empty(steps - 1, tokens, dim),
    )


def _fake_overcomplete_bwd(dout: Tensor, x: Tensor, weight: Tensor, decoder: Tensor | None, *rest: Any) -> Any:
    ddecoder = weight.new_empty(0 if decoder is None else decoder.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), ddecoder


def _product(x_shape: tuple[int, ...], width: int) -> int:
    """FLOP of one product of the tokens with a (dim, width) matrix."""
    return 2 * prod(x_shape) * width


ista_fwd = operator.define(
    f"ista_fwd(Tensor x, Tensor weight, {_OPTIONS}, str backend) -> Tensor",
    _kernel("forward"),
    lambda x, weight, *rest: x.new_empty(x.shape),
    flops=lambda x, weight, *rest, **_: _product(x, x[-1]) + 2 * x[-1] ** 3,
)
ista_bwd = operator.define(
    f"ista_bwd(Tensor dy, Tensor x, Tensor weight, Tensor y, {_OPTIONS}, bool need_dx, bool need_dweight, "
    "str backend) -> (Tensor, Tensor)",
    _run_backward,
    _fake_ista_bwd,
    flops=lambda dy, x, weight, y, *rest, **_: 2 * _product(x, x[-1]) + 4 * x[-1] ** 3,
)
ista_overcomplete_fwd = operator.define(
    f"ista_overcomplete_fwd(Tensor x, Tensor weight, Tensor? decoder, {_STEPS}, bool keep, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _kernel("forward_overcomplete"),
    _fake_overcomplete_fwd,
    flops=lambda x, weight, decoder, eta, lambd, steps, *rest, **_: 2 * steps * _product(x, weight[1]),
)
ista_overcomplete_bwd = operator.define(
    "ista_overcomplete_bwd(Tensor dout, Tensor x, Tensor weight, Tensor? decoder, Tensor codes, Tensor residuals, "
    f"{_STEPS}, str backend) -> (Tensor, Tensor, Tensor)",
    _kernel("backward_overcomplete"),
    _fake_overcomplete_bwd,
    flops=lambda dout, x, weight, decoder, codes, residuals, eta, lambd, steps, *rest, **_: (
        4 * steps * _product(x, weight[1])
    ),
)


@operator.traced_by_autograd
class ISTAFunction(torch.autograd.Function):
    """y = ista_fwd(x, weight, *options), differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
        y = ista_fwd(x, weight, *options)
        ISTAFunction.save(ctx, (x, weight, *options), y)
        return y

    @staticmethod
    def save(ctx: Any, inputs: tuple, y: Tensor) -> None:
        x, weight, *ctx.options, ctx.backend = inputs
        ctx.save_for_backward(x, weight, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, y = operator.saved_tensors("ista", ctx)
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        dx, dweight = ista_bwd(dy, x, weight, y, *ctx.options, need_dx, need_dweight, ctx.backend)
        dx = operator.once_differentiable("ista", dx, dy, x, weight) if need_dx else None
        dweight = operator.once_differentiable("ista", dweight, dy, x, weight) if need_dweight else None
        return dx, dweight, *(None,) * (len(ctx.options) + 1)


@operator.traced_by_autograd
class OvercompleteISTAFunction(torch.autograd.Function):
    """(out, codes, residuals) = ista_overcomplete_fwd(...), out differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, decoder: Tensor | None, *options: Any) -> Any:
        outputs = ista_overcomplete_fwd(x, weight, decoder, *options)
        OvercompleteISTAFunction.save(ctx, (x, weight, decoder, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, decoder, *ctx.options, _, ctx.backend = inputs
        _, codes, residuals = outputs
        ctx.mark_non_differentiable(codes, residuals)
        ctx.save_for_backward(x, weight, decoder, codes, residuals)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, decoder, *saved = operator.saved_tensors("ista_overcomplete", ctx)
        grads = ista_overcomplete_bwd(dout, x, weight, decoder, *saved, *ctx.options, ctx.backend)
        sources = (dout, x, weight, decoder)
        dx, dweight, ddecoder = (operator.once_differentiable("ista_overcomplete", g, *sources) for g in grads)
        return dx, dweight, None if decoder is None else ddecoder, *(None,) * (len(ctx.options) + 2)


operator.functorch_twin(ISTAFunction, ista_fwd)
operator.functorch_twin(OvercompleteISTAFunction, ista_overcomplete_fwd)


def ista(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Run the op, through autograd only when a gradient is wanted."""
    if operator.needs_grad(x, weight):
        return operator.apply(ISTAFunction, x, weight, *options)
    return ista_fwd(x, weight, *options)


def ista_overcomplete(x: Tensor, weight: Tensor, decoder: Tensor | None, *options: Any) -> Tensor:
    """Run the op, keeping the codes only when a gradient is wanted; ``options`` end in the backend."""
    *steps, backend = options
    if operator.needs_grad(x, weight, decoder):
        return operator.apply(OvercompleteISTAFunction, x, weight, decoder, *steps, True, backend)[0]
    return ista_overcomplete_fwd(x, weight, decoder, *steps, False, backend)[0]
