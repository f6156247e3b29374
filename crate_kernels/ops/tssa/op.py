"""The op boundary of token-statistics attention: schemas, fakes and the autograd.Functions.

The full and the causal form are two ops, for they save different tensors: (w, temp, membership, energy, moment) and
(w, temp, denom_bias, membership, sums). The last one has numbers only where the backward's kernel begins with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import autograd, backends, operator, vmapped
from crate_kernels._core.shortcuts import Shortcuts
from crate_kernels.ops.tssa.call import State, TSSACall

_OPTIONS = f"{operator.schema_of(TSSACall)}, str backend"


def _fake_fwd(w: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, call, _ = operator.split(TSSACall, rest)
    return operator.empty_out(w), call.empty_membership(w), call.empty_channels(w), call.empty_channels(w)


def _fake_bwd(dout: Tensor, dmembership: Any, w: Tensor, temp: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return operator.empty_out(w), torch.empty_like(temp)


def _fake_causal_fwd(w: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, call, _ = operator.split(TSSACall, rest)
    return operator.empty_out(w), call.empty_membership(w), call.empty_sums(w)


def _fake_causal_bwd(
    dout: Tensor, dmembership: Any, w: Tensor, temp: Tensor, denom_bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ddenom_bias = temp.new_empty(0) if denom_bias is None else denom_bias.new_empty(denom_bias.shape)
    return operator.empty_out(w), torch.empty_like(temp), ddenom_bias


def _fake_decode(w: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return operator.empty_out(w), TSSACall().empty_membership(w)


def _run_decode(w: Tensor, temp: Tensor, denom_bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Decode by the backend, with the tensors of the cache contiguous."""
    *state, mask, backend = rest

    def run(*contiguous: Tensor) -> Any:
        return backends.run("tssa", "decode", backend, w, w, temp, denom_bias, State(*contiguous), mask)

    return operator.with_contiguous(run, *state)


tssa_fwd = operator.define(
    f"tssa_fwd(Tensor w, Tensor temp, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    operator.make_dispatcher("tssa", "forward", TSSACall, dispatch_arg=0),
    _fake_fwd,
    join=vmapped.batched(TSSACall, shared=(1,)),
)
tssa_bwd = operator.define(
    "tssa_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy, "
    f"Tensor moment, {_OPTIONS}) -> (Tensor, Tensor)",
    operator.make_dispatcher("tssa", "backward", TSSACall, dispatch_arg=2),
    _fake_bwd,
)
tssa_causal_fwd = operator.define(
    f"tssa_causal_fwd(Tensor w, Tensor temp, Tensor? denom_bias, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    operator.make_dispatcher("tssa", "forward_causal", TSSACall, dispatch_arg=0),
    _fake_causal_fwd,
    join=vmapped.batched(TSSACall, shared=(1, 2)),
)
tssa_causal_bwd = operator.define(
    "tssa_causal_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, "
    f"Tensor membership, Tensor sums, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    operator.make_dispatcher("tssa", "backward_causal", TSSACall, dispatch_arg=2),
    _fake_causal_bwd,
)
tssa_decode = operator.define(
    "tssa_decode(Tensor w, Tensor temp, Tensor? denom_bias, Tensor(a!) energy, Tensor(b!) weighted, Tensor(c!) mass, "
    "Tensor(d!) lengths, Tensor? key_padding_mask, str backend) -> (Tensor, Tensor)",
    _run_decode,
    _fake_decode,
)


def _gradients(ctx: Any, op: Any, inputs: int, saved: tuple[tuple, TSSACall], grads: tuple) -> tuple:
    """Return the gradients of the first ``inputs`` inputs of a Function, and None for its options."""
    tensors, call = saved
    sources, (dout, dmembership, *_) = tensors[:inputs], grads
    if dout is None and dmembership is None:
        return (None,) * (inputs + len(call) + 1)
    upstream = torch.zeros_like(tensors[0]) if dout is None else dout
    found = op(*_arguments(ctx.needs_input_grad, (upstream, dmembership), tensors), *call, ctx.backend)
    once = [autograd.once_differentiable("tssa", g, dout, dmembership, *sources) for g in found]
    wanted = (g if source is not None else None for g, source in zip(once, sources, strict=True))
    return *wanted, *(None,) * (len(call) + 1)


def _arguments(needs: tuple[bool, ...], grads: tuple, saved: tuple) -> tuple:
    """Return the arguments of a backward's op before its options."""
    return (*grads[:2], *saved)


@autograd.traced_by_autograd
class TSSAFunction(torch.autograd.Function):
    """(out, membership, ...) = tssa_fwd(w, temp, *call, backend); out and membership differentiable once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = tssa_fwd(*inputs)
        TSSAFunction.save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        differentiable, call, backend = operator.split(TSSACall, inputs)
        autograd.save(ctx, TSSAFunction, differentiable, outputs, call, backend)

    @staticmethod
    def save_tensors(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...], option_tensors: tuple) -> None:
        _, membership, *statistics = outputs
        ctx.mark_non_differentiable(*statistics)
        ctx.save_for_backward(*inputs, membership, *statistics, *option_tensors)
        ctx.set_materialize_grads(False)

    arguments = staticmethod(_arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        return TSSAFunction.gradients(ctx, autograd.saved("tssa", ctx), *grads)

    @staticmethod
    def gradients(ctx: Any, saved: tuple[tuple, TSSACall], *grads: Tensor | None) -> tuple:
        return _gradients(ctx, tssa_bwd, 2, saved, grads)


@autograd.traced_by_autograd
class CausalTSSAFunction(torch.autograd.Function):
    """(out, membership, sums) = tssa_causal_fwd(w, temp, denom_bias, *call, backend), but for sums differentiable once.

    The call is one that saves sums where the backward's kernel begins with them.
    """

    save, save_tensors = TSSAFunction.save, TSSAFunction.save_tensors

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        (w, temp, denom_bias), call, backend = operator.split(TSSACall, inputs)
        inputs = w, temp, denom_bias, *saving_sums(w, temp, denom_bias, call, backend), backend
        outputs = tssa_causal_fwd(*inputs)
        CausalTSSAFunction.save(ctx, inputs, outputs)
        return outputs

    arguments = staticmethod(_arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        return CausalTSSAFunction.gradients(ctx, autograd.saved("tssa", ctx), *grads)

    @staticmethod
    def gradients(ctx: Any, saved: tuple[tuple, TSSACall], *grads: Tensor | None) -> tuple:
        return _gradients(ctx, tssa_causal_bwd, 3, saved, grads)


autograd.functorch_twin(TSSAFunction, tssa_fwd)
autograd.functorch_twin(CausalTSSAFunction, tssa_causal_fwd)
autograd.differentiate(tssa_fwd, TSSAFunction)
autograd.differentiate(tssa_causal_fwd, CausalTSSAFunction)
shortcuts = Shortcuts("tssa", tssa_fwd, tssa_bwd, TSSAFunction, inputs=2)
causal_shortcuts = Shortcuts("tssa", tssa_causal_fwd, tssa_causal_bwd, CausalTSSAFunction, inputs=3)


def tssa(w: Tensor, temp: Tensor, call: TSSACall, backend: str) -> tuple[Tensor, Tensor]:
    """Run the full form, through autograd only when a gradient is wanted."""
    wanted = autograd.needs_grad(w, temp)
    out, membership, _, _ = (
        autograd.apply(TSSAFunction, w, temp, *call, backend) if wanted else tssa_fwd(w, temp, *call, backend)
    )
    return out, membership


def tssa_causal(
    w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall, backend: str
) -> tuple[Tensor, Tensor]:
    """Run the causal form, through autograd only when a gradient is wanted."""
    wanted = autograd.needs_grad(w, temp, denom_bias)
    out, membership, _ = (
        autograd.apply(CausalTSSAFunction, w, temp, denom_bias, *call, backend)
        if wanted
        else tssa_causal_fwd(w, temp, denom_bias, *call, backend)
    )
    return out, membership


def saving_sums(w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall, backend: str) -> TSSACall:
    """Return the call whose forward saves what the backward's kernel begins with, or ``call`` if that is nothing."""
    args = (w, temp, denom_bias, call)
    name, _ = next(backends.eligible_backends("tssa", "forward_causal", backend, w, *args), ("", None))
    kernel = backends.kernel("tssa", name, backends.type_of(w.device)) if name else None
    every = getattr(kernel, "sums_every", None)
    if every is None or call.sums_every:
        return call
    try:
        return call._replace(sums_every=every(w, call))
    except backends.Refused:  # as the op is going to be
        return call
