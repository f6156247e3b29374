"""The op boundary of subspace self-attention: schemas, fakes and the autograd.Function.

Every backend behind it saves the same tensors (w, out, lse, seed), so that any backend's backward
can follow any backend's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, backends, operator, vmapped
from crate_kernels._core.shortcuts import Shortcuts
from crate_kernels.ops.mssa import order
from crate_kernels.ops.mssa.call import OPTIONAL_SCALE, DecodeCall, MSSACall, default_scale, empty_decoded, empty_lse

_OPTIONS = f"{OPTIONAL_SCALE}, str backend"
_SCALE = MSSACall._fields.index("scale") - len(MSSACall._fields) - 1  # counted from the end, where the backend follows


def _fake_forward(w: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return operator.empty_out(w), empty_lse(w)


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, *_: Any) -> Tensor:
    return operator.empty_out(w)


def _fake_decode(w: Tensor, data: Tensor, lengths: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _, call, _ = operator.split(DecodeCall, options)
    return empty_decoded(w, call)


def _products(w_shape: tuple[int, ...], options: tuple) -> int:
    """FLOP of one (seqlen, seqlen, head_dim) product over the whole call; halved when causal."""
    _, call, _ = operator.split(MSSACall, options)
    if len(w_shape) == 3:
        # Offsets are not shapes: count every packed sequence as the longest.
        total, nheads, head_dim = w_shape
        product = 2 * nheads * total * call.max_seqlen * head_dim
    else:
        batch, nheads, seqlen, head_dim = w_shape
        product = 2 * batch * nheads * seqlen * seqlen * head_dim
    return product // 2 if call.causal else product


def _dispatcher(method: str, dispatch_arg: int, reorder: backends.BackendOrder | None = None) -> Callable:
    """Return the body of an op, which fills in the default scale."""
    run = operator.make_dispatcher("mssa", method, MSSACall, dispatch_arg, reorder=reorder)

    def filled(*args: Any) -> Any:
        if args[_SCALE] is None:
            args = (*args[:_SCALE], default_scale(args[dispatch_arg]), *args[_SCALE + 1 :])
        return run(*args)

    return filled


_dispatch_decode = operator.make_dispatcher("mssa", "decode", DecodeCall, dispatch_arg=0, reorder=order.decode)


def choose_decode(backend: str, w: Tensor, *args: Any) -> tuple[str, Callable]:
    """Return the first backend that a step with a cache tries, and its function."""
    return next(backends.eligible_backends("mssa", "decode", backend, w, w, *args, order=order.decode))


def _run_decode(w: Tensor, data: Tensor, lengths: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Decode by the backend, with contiguous lengths."""
    return operator.with_contiguous(lambda contiguous: _dispatch_decode(w, data, contiguous, *options), lengths)


mssa_fwd = operator.define(
    f"mssa_fwd(Tensor w, {_OPTIONS}) -> (Tensor, Tensor)",
    _dispatcher("forward", dispatch_arg=0),
    _fake_forward,
    flops=lambda w_shape, *options, out_shape=None, **_: 2 * _products(w_shape, options),
    join=vmapped.batched(MSSACall),
)
mssa_bwd = operator.define(
    f"mssa_bwd(Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor",
    _dispatcher("backward", dispatch_arg=2, reorder=order.backward),
    _fake_backward,
    flops=lambda dout, dlse, w_shape, out, lse, *options, out_shape=None, **_: 5 * _products(w_shape, options),
    join=vmapped.batched(MSSACall),
)
mssa_decode = operator.define(
    f"mssa_decode(Tensor w, Tensor(a!) data, Tensor(b!) lengths, {operator.schema_of(DecodeCall)}, str backend) "
    "-> (Tensor, Tensor)",
    _run_decode,
    _fake_decode,
    planned_where=backends.are_planned_on_gpus,
)


def decode(w: Tensor, data: Tensor, lengths: Tensor, call: DecodeCall, backend: str) -> tuple[Tensor, Tensor]:
    """Run a step with a cache; on a GPU its bound is rounded, so that one plan serves many steps."""
    if w.is_cuda and backend != "composite":
        call = call.rounded()
    return mssa_decode(w, data, lengths, *call, backend)


@autograd.traced_by_autograd
class MSSAFunction(torch.autograd.Function):
    """(out, lse) = mssa_fwd(w, *options), differentiable once with respect to w."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        outputs = mssa_fwd(w, *options)
        MSSAFunction.save(ctx, (w, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        w, *options, backend = inputs
        autograd.save(ctx, MSSAFunction, (w,), outputs, MSSACall._make(options), backend)

    @staticmethod
    def save_tensors(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor], option_tensors: tuple) -> None:
        ctx.save_for_backward(*inputs, *outputs, *option_tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore
        return MSSAFunction.gradients(ctx, autograd.saved("mssa", ctx), dout, dlse)

    @staticmethod
    def arguments(needs: tuple[bool, ...], grads: tuple, saved: tuple) -> tuple:
        return (*grads, *saved)

    @staticmethod
    def gradients(ctx: Any, saved: tuple[tuple, MSSACall], *grads: Tensor | None) -> tuple:
        tensors, call = saved
        nothing = (None,) * (len(call) + 1)
        if all(g is None for g in grads):
            return None, *nothing
        dw = mssa_bwd(*MSSAFunction.arguments(ctx.needs_input_grad, grads, tensors), *call, ctx.backend)
        return autograd.once_differentiable("mssa", dw, *grads, tensors[0]), *nothing


autograd.functorch_twin(MSSAFunction, mssa_fwd)
autograd.differentiate(mssa_fwd, MSSAFunction)
shortcuts = Shortcuts("mssa", mssa_fwd, mssa_bwd, MSSAFunction, inputs=1)


def mssa(w: Tensor, call: MSSACall, backend: str) -> tuple[Tensor, Tensor]:
    """Run the op, through autograd only when a gradient is wanted."""
    if autograd.needs_grad(w):
        return autograd.apply(MSSAFunction, w, *call, backend)
    return mssa_fwd(w, *call, backend)
