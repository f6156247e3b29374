"""The op boundary of sparse coding: schemas, fakes and the autograd.Functions.

Saved tensors are (x, weight, y): the mask of the backward is y itself. The number of products per call
depends on the number of tokens and is decided inside the op, so compile never recompiles for it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, backends, operator, products
from crate_kernels._core.shortcuts import Shortcuts
from crate_kernels.ops.ista import steps
from crate_kernels.ops.ista.call import ISTACall, OvercompleteCall

_OPTIONS = f"{operator.schema_of(ISTACall)}, str backend"
_SMALL = 40 << 20  # multiplications of a product in bfloat16, up to which cpp's backward is faster than composite's
_OVERCOMPLETE_OPTIONS = f"{operator.schema_of(OvercompleteCall)}, str backend"


def _backward_order(names: tuple[str, ...], dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[str, ...]:
    """Let composite differentiate where it is as fast as cpp.

    With bfloat16 weights the cpp kernels save no pass: on AVX512-BF16 they take 0.93-1.2 times as long for dim 192-768
    and up to 6304 tokens, on two threads. For small products the number of calls counts, and cpp has fewer: on one
    thread it takes 0.79 to 0.9 of the time from 64 x 192 to 1024 x 192, and 0.94 of 197 x 384.
    """
    rows = prod(x.shape[:-1])
    in_bfloat16 = weight.dtype == products.fast_dtype(weight.dtype, rows) == torch.bfloat16
    if names[0] != "cpp" or not in_bfloat16 or x.device.type != "cpu":
        return names
    return names if x.numel() * weight.shape[1] <= _SMALL else ("composite",)


def _fake_ista_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, need_dx: bool, need_dweight: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if need_dx else (0,)), weight.new_empty(weight.shape if need_dweight else (0,))


def _fake_overcomplete_fwd(
    x: Tensor, weight: Tensor, decoder: Tensor | None, keep: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *own, _ = options
    steps = OvercompleteCall(*own).steps
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


def _takes_one_product(
    function: str, form: str, tensors: tuple[Tensor, ...], needs: tuple[bool, ...], options: tuple
) -> bool:
    """Return whether the backend that runs ``function`` takes one product; one without an engine, where fewer FLOP."""
    *fields, backend = options
    call, (x, weight) = ISTACall(*fields), tensors[-2:]
    order = _backward_order if function == "backward" else None
    name, _ = next(backends.eligible_backends("ista", function, backend, x, *tensors, call, order=order))
    kernel = backends.kernel("ista", name, backends.type_of(x.device))
    is_few, engine_of = getattr(kernel, "is_few", None), getattr(kernel, "engine", None)
    if is_few is not None and is_few(x, weight, call):
        return False
    return getattr(steps.Engine() if engine_of is None else engine_of(x), form)(steps.flat(x), *needs)


def _forward_flops(x: Tensor, weight: Tensor, *options: Any, **_: Any) -> int:
    """FLOP of the forward in the form that it takes."""
    one = _takes_one_product("forward", "one_product", (x, weight), (), options)
    product = _product(tuple(x.shape), x.shape[-1])
    return product + 2 * x.shape[-1] ** 3 if one else 2 * product


def _backward_flops(
    dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, need_dx: bool, need_dweight: bool, *options: Any, **_: Any
) -> int:
    """FLOP of the backward in the form that it takes."""
    product = _product(tuple(x.shape), x.shape[-1])
    if _takes_one_product("backward", "one_product_back", (dy, x, weight), (need_dx, need_dweight), options):
        return (need_dx + need_dweight) * (product + 2 * x.shape[-1] ** 3)
    return (1 + need_dx + 3 * need_dweight) * product


def _overcomplete_flops(x_shape: tuple[int, ...], hidden: int, options: tuple) -> int:
    """FLOP of the products with the dictionary in all steps of the forward; the backward has twice as many."""
    *own, _ = options
    return 2 * OvercompleteCall(*own).steps * _product(x_shape, hidden)


def _join_fwd(op: Any, size: int, mapped: tuple[bool, ...], args: tuple) -> tuple[Any, Any] | None:
    """Step on the tokens of all samples at once, if they have one dictionary."""
    return None if mapped[1] else (op(*args), 0)


def _join_bwd(op: Any, size: int, mapped: tuple[bool, ...], args: tuple) -> tuple[Any, Any] | None:
    """Differentiate by the tokens of all samples at once, if they have one dictionary; by it, for each."""
    dy, x, weight, y, need_dx, need_dweight, *options, backend = args
    if mapped[2]:
        return None
    dy, x, y = (t if m else t.expand(size, *t.shape) for t, m in ((dy, mapped[0]), (x, mapped[1]), (y, mapped[3])))
    dx = op(dy, x, weight, y, True, False, *options, backend)[0] if need_dx else x.new_empty(size, 0)
    dweight = steps.each_dweight(dy, x, weight, y, ISTACall(*options)) if need_dweight else weight.new_empty(size, 0)
    return (dx, dweight), (0, 0)


def _join_overcomplete_fwd(op: Any, size: int, mapped: tuple[bool, ...], args: tuple) -> tuple[Any, Any] | None:
    """Step on the tokens of all samples at once, if they have one dictionary."""
    if mapped[1] or mapped[2]:
        return None
    out, *saved = op(*args)
    tokens = prod(args[0].shape[1:-1])
    apart = (t.unflatten(1, (size, tokens)) if t.dim() == 3 else t.expand(1, size, 0) for t in saved)
    return (out, *apart), (0, 1, 1)


ista_fwd = operator.define(
    f"ista_fwd(Tensor x, Tensor weight, {_OPTIONS}) -> Tensor",
    operator.make_dispatcher("ista", "forward", ISTACall, dispatch_arg=0),
    lambda x, weight, *options: x.new_empty(x.shape),
    flops=_forward_flops,
    flops_of_tensors=True,
    join=_join_fwd,
)
ista_bwd = operator.define(
    f"ista_bwd(Tensor dy, Tensor x, Tensor weight, Tensor y, bool need_dx, bool need_dweight, {_OPTIONS})"
    " -> (Tensor, Tensor)",
    operator.make_dispatcher("ista", "backward", ISTACall, dispatch_arg=1, reorder=_backward_order),
    _fake_ista_bwd,
    flops=_backward_flops,
    flops_of_tensors=True,
    join=_join_bwd,
)
ista_overcomplete_fwd = operator.define(
    f"ista_overcomplete_fwd(Tensor x, Tensor weight, Tensor? decoder, bool keep, {_OVERCOMPLETE_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    operator.make_dispatcher(
        "ista", "forward_overcomplete", OvercompleteCall, dispatch_arg=0, public_name="ista_overcomplete"
    ),
    _fake_overcomplete_fwd,
    flops=lambda x, weight, decoder, keep, *options, **_: _overcomplete_flops(x, weight[1], options),
    join=_join_overcomplete_fwd,
)
ista_overcomplete_bwd = operator.define(
    "ista_overcomplete_bwd(Tensor dout, Tensor x, Tensor weight, Tensor? decoder, Tensor codes, Tensor residuals, "
    f"{_OVERCOMPLETE_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    operator.make_dispatcher(
        "ista", "backward_overcomplete", OvercompleteCall, dispatch_arg=1, public_name="ista_overcomplete"
    ),
    _fake_overcomplete_bwd,
    flops=lambda dout, x, weight, decoder, codes, residuals, *options, **_: (
        2 * _overcomplete_flops(x, weight[1], options)
    ),
)


@autograd.traced_by_autograd
class ISTAFunction(torch.autograd.Function):
    """y = ista_fwd(x, weight, *call, backend), differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
        y = ista_fwd(x, weight, *options)
        ISTAFunction.save(ctx, (x, weight, *options), y)
        return y

    @staticmethod
    def save(ctx: Any, inputs: tuple, y: Tensor) -> None:
        x, weight, *options, backend = inputs
        autograd.save(ctx, ISTAFunction, (x, weight), y, ISTACall(*options), backend)

    @staticmethod
    def save_tensors(ctx: Any, inputs: tuple, y: Tensor, option_tensors: tuple) -> None:
        ctx.save_for_backward(*inputs, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ISTAFunction.gradients(ctx, autograd.saved("ista", ctx), dy)

    @staticmethod
    def arguments(needs: tuple[bool, ...], grads: tuple, saved: tuple) -> tuple:
        return (*grads, *saved, *needs[:2])

    @staticmethod
    def gradients(ctx: Any, saved: tuple[tuple, ISTACall], dy: Tensor) -> tuple:
        (x, weight, y), call = saved
        need_dx, need_dweight, *_ = ctx.needs_input_grad
        arguments = ISTAFunction.arguments(ctx.needs_input_grad, (dy,), (x, weight, y))
        dx, dweight = ista_bwd(*arguments, *call, ctx.backend)
        dx = autograd.once_differentiable("ista", dx, dy, x, weight) if need_dx else None
        dweight = autograd.once_differentiable("ista", dweight, dy, x, weight) if need_dweight else None
        return dx, dweight, *(None,) * (len(call) + 1)


@autograd.traced_by_autograd
class OvercompleteISTAFunction(torch.autograd.Function):
    """(out, codes, residuals) = _forward_keeping_codes(x, weight, decoder, *call, backend), out differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, decoder: Tensor | None, *options: Any) -> Any:
        outputs = _forward_keeping_codes(x, weight, decoder, *options)
        OvercompleteISTAFunction.save(ctx, (x, weight, decoder, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, decoder, *options, backend = inputs
        function, call = OvercompleteISTAFunction, OvercompleteCall(*options)
        autograd.save(ctx, function, (x, weight, decoder), outputs, call, backend)

    @staticmethod
    def save_tensors(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor], option_tensors: tuple) -> None:
        _, codes, residuals = outputs
        ctx.mark_non_differentiable(codes, residuals)
        ctx.save_for_backward(*inputs, codes, residuals)
        ctx.set_materialize_grads(False)  # zeros for the codes would be as many bytes as they are

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return OvercompleteISTAFunction.gradients(ctx, autograd.saved("ista_overcomplete", ctx), dout)

    @staticmethod
    def arguments(needs: tuple[bool, ...], grads: tuple, saved: tuple) -> tuple:
        return (grads[0], *saved)

    @staticmethod
    def gradients(ctx: Any, saved: tuple[tuple, OvercompleteCall], dout: Tensor, *_: Any) -> tuple:
        (x, weight, decoder, *results), call = saved
        grads = ista_overcomplete_bwd(dout, x, weight, decoder, *results, *call, ctx.backend)
        sources = (dout, x, weight, decoder)
        dx, dweight, ddecoder = (autograd.once_differentiable("ista_overcomplete", g, *sources) for g in grads)
        return dx, dweight, None if decoder is None else ddecoder, *(None,) * (len(call) + 1)


def _forward_keeping_codes(
    x: Tensor, weight: Tensor, decoder: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the overcomplete forward and keep what its backward reads."""
    return ista_overcomplete_fwd(x, weight, decoder, True, *options)


autograd.functorch_twin(ISTAFunction, ista_fwd)
autograd.functorch_twin(OvercompleteISTAFunction, _forward_keeping_codes)
autograd.differentiate(ista_fwd, ISTAFunction)
autograd.differentiate(
    ista_overcomplete_fwd,
    OvercompleteISTAFunction,
    lambda x, weight, decoder, keep, *options: (x, weight, decoder, *options),
)
shortcuts = Shortcuts("ista", ista_fwd, ista_bwd, ISTAFunction, inputs=2)
overcomplete_shortcuts = Shortcuts(
    "ista_overcomplete", ista_overcomplete_fwd, ista_overcomplete_bwd, OvercompleteISTAFunction, inputs=3
)


def ista(x: Tensor, weight: Tensor, call: ISTACall, backend: str) -> Tensor:
    """Run the op, through autograd only when a gradient is wanted."""
    if autograd.needs_grad(x, weight):
        return autograd.apply(ISTAFunction, x, weight, *call, backend)
    return ista_fwd(x, weight, *call, backend)


def ista_overcomplete(
    x: Tensor, weight: Tensor, decoder: Tensor | None, call: OvercompleteCall, backend: str
) -> Tensor:
    """Run the op, keeping the codes only when a gradient is wanted."""
    if autograd.needs_grad(x, weight, decoder) and not operator.is_recorded():
        out, _, _ = autograd.apply(OvercompleteISTAFunction, x, weight, decoder, *call, backend)
    else:
        out, _, _ = ista_overcomplete_fwd(x, weight, decoder, False, *call, backend)
    return out
