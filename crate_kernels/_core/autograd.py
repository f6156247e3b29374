"""Makes ops differentiable: what a forward saves, what its backward reads, and what functorch and graphs see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import imports, operator

_twins: dict[type, type] = {}
_op_of: dict[type, Callable] = {}  # by an autograd.Function: the op of its arguments


def traced_by_autograd(function: type) -> type:
    """Have torch.compile trace an autograd.Function by running it, as a decorator.

    Autograd then refuses a saved tensor that was changed in place. Dynamo's own translation of a Function silently
    uses the changed value (PyTorch 2.13).
    """
    imports.when_imported("torch._dynamo", lambda _: torch.compiler.allow_in_graph(function))
    return function


def save(ctx: Any, function: Any, inputs: tuple, outputs: Any, call: Any, backend: str) -> None:
    """Save for a backward pass what ``function.save_tensors`` says of a call, its options and its ``ctx.backend``."""
    tensor_options = tuple(name for name in operator.tensor_fields(type(call)) if getattr(call, name) is not None)
    function.save_tensors(ctx, inputs, outputs, tuple(getattr(call, name) for name in tensor_options))
    ctx.call = call._replace(**dict.fromkeys(tensor_options)) if tensor_options else call
    ctx.tensor_options, ctx.backend = tensor_options, backend


def saved(op: str, ctx: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the tensors and the options that ``save`` saved."""
    return with_tensor_options(saved_tensors(op, ctx), ctx.call, ctx.tensor_options)


def with_tensor_options(tensors: tuple[Any, ...], call: Any, names: tuple[str, ...]) -> tuple[tuple[Any, ...], Any]:
    """Return the tensors that were saved, and the options with those of ``names``, which come last."""
    if not names:
        return tensors, call
    first = len(tensors) - len(names)
    return tensors[:first], call._replace(**dict(zip(names, tensors[first:], strict=True)))


def saved_tensors(op: str, ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that a Function saved; if one was changed in place since, raise an error with advice."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"{op}: an input or output of this call was changed in place before the backward pass, which reads it; "
            "change a copy instead: out = out + x, or out.clone()"
        ) from error


def differentiate(op: Callable, function: type, arguments: Callable = lambda *args: args) -> None:
    """Have calls of an op in a graph differentiated by an autograd.Function, of ``arguments`` of the op's."""
    operator.of_op[op.__name__] = lambda *args: apply(function, *arguments(*args))


def functorch_twin(function: type, op: Callable) -> None:
    """Give an autograd.Function a twin that functorch transforms accept.

    ``function`` has static methods ``save(ctx, inputs, outputs)`` and ``backward``; ``op`` maps its
    inputs to its outputs. The twin's separate ``setup_context`` costs an ``inspect`` bind per call,
    so the twin is used only while a transform is active.
    """
    body = {
        "generate_vmap_rule": True,
        "forward": staticmethod(op),
        "setup_context": staticmethod(function.save),  # pyright: ignore[reportAttributeAccessIssue]
        "backward": staticmethod(function.backward),  # pyright: ignore[reportAttributeAccessIssue]
    }
    _twins[function] = type(f"{function.__name__}Functorch", (torch.autograd.Function,), body)
    _op_of[function] = op


def apply(function: Any, *args: Any) -> Any:
    """Apply an autograd.Function, or its twin while a functorch transform is active; jit.trace records its op."""
    if operator.is_recorded():
        return _op_of[function](*args)
    if operator.functorch_is_active():
        function = _twins.get(function, function)
    return function.apply(*args)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether any of ``tensors`` may need a gradient from this call; under a functorch transform, assume so."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return operator.functorch_is_active()


class _RefuseDoubleBackward(torch.autograd.Function):
    """Identity on a gradient; its derivative raises an error with advice."""

    generate_vmap_rule = True  # torch.func.grad builds this graph too; jacrev maps over it

    @staticmethod
    def forward(message: str, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(ctx.message)


def once_differentiable(
    op: str, grad: Tensor, *sources: Tensor | None, where: str = "by this backend; use backend='reference'"
) -> Tensor:
    """Return ``grad``; under ``create_graph=True``, refuse to differentiate the result again.

    ``where`` ends the message. ``sources`` are the tensors that the gradient depends on. If none of them requires a
    gradient, autograd takes the result for a constant and its derivative for zero.
    """
    if not torch.is_grad_enabled():
        return grad
    message = f"{op}: double backward is not supported {where}"
    return _RefuseDoubleBackward.apply(message, grad, *(s for s in sources if s is not None))  # pyright: ignore
