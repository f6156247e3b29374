"""The op boundary of token-statistics attention: schemas, fakes and the autograd.Functions.

The full and the causal form are different functions with different saved tensors, so they are two
ops: (w, temp, membership, energy, moment) are saved for one, (w, temp, denom_bias, membership) for the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import backends, operator

_OPTIONS = "Tensor? key_padding_mask, Tensor? cu_seqlens, SymInt max_seqlen, Tensor? seed, float dropout_p, str backend"


def _kernel(name: str) -> Any:
    of = 2 if name.startswith("backward") else 0  # where w is
    return lambda *args: backends.run("tssa", name, args[-1], args[of], *args[:-1])


def _empty_membership(w: Tensor) -> Tensor:
    rows = (w.shape[1], w.shape[0]) if w.dim() == 3 else w.shape[:3]
    return w.new_empty(rows, dtype=operator.stat_dtype(w.dtype))


def _fake_fwd(w: Tensor, temp: Tensor, mask: Any, cu_seqlens: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    batch = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sums = (batch, w.shape[1], w.shape[-1])
    dtype = operator.stat_dtype(w.dtype)
    empty = w.new_empty(sums, dtype=dtype), w.new_empty(sums, dtype=dtype)
    return operator.empty_out(w), _empty_membership(w), *empty


def _fake_bwd(dout: Tensor, dmembership: Any, w: Tensor, temp: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return operator.empty_out(w), torch.empty_like(temp)


def _fake_causal_fwd(w: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return operator.empty_out(w), _empty_membership(w)


def _fake_causal_bwd(
    dout: Tensor, dmembership: Any, w: Tensor, temp: Tensor, denom_bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ddenom_bias = temp.new_empty(0) if denom_bias is None else denom_bias.new_empty(denom_bias.shape)
    return operator.empty_out(w), torch.empty_like(temp), ddenom_bias


def _run_decode(w: Tensor, temp: Tensor, denom_bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    """Decode by the backend, on the state of a cache contiguous."""
    *state, mask, backend = args
    run = partial(backends.run, "tssa", "decode", backend, w, w, temp, denom_bias)
    return operator.with_contiguous(lambda *held: run(*held, mask), *state)


tssa_fwd = operator.define(
    f"tssa_fwd(Tensor w, Tensor temp, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _kernel("forward"),
    _fake_fwd,
)
tssa_bwd = operator.define(
    "tssa_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy, "
    f"Tensor moment, {_OPTIONS}) -> (Tensor, Tensor)",
    _kernel("backward"),
    _fake_bwd,
)
tssa_causal_fwd = operator.define(
    f"tssa_causal_fwd(Tensor w, Tensor temp, Tensor? denom_bias, {_OPTIONS}) -> (Tensor, Tensor)",
    _kernel("forward_causal"),
    _fake_causal_fwd,
)
tssa_causal_bwd = operator.define(
    "tssa_causal_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, "
    f"Tensor membership, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _kernel("backward_causal"),
    _fake_causal_bwd,
)


tssa_decode = operator.define(
    "tssa_decode(Tensor w, Tensor temp, Tensor? denom_bias, Tensor(a!) energy, Tensor(b!) weighted, Tensor(c!) mass, "
    "Tensor(d!) lengths, Tensor? key_padding_mask, str backend) -> (Tensor, Tensor)",
    _run_decode,
    _fake_causal_fwd,
)


@operator.traced_by_autograd
class TSSAFunction(torch.autograd.Function):
    """(out, membership, ...) = tssa_fwd(w, temp, *options); out and membership differentiable once."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, temp: Tensor, *options: Any) -> Any:
        outputs = tssa_fwd(w, temp, *options)
        TSSAFunction.save(ctx, (w, temp, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        w, temp, key_padding_mask, cu_seqlens, ctx.max_seqlen, seed, ctx.dropout_p, ctx.backend = inputs
        _, membership, energy, moment = outputs
        ctx.mark_non_differentiable(energy, moment)
        ctx.save_for_backward(w, temp, membership, energy, moment, key_padding_mask, cu_seqlens, seed)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dmembership: Tensor | None, *_: Any) -> Any:  # pyright: ignore
        *saved, key_padding_mask, cu_seqlens, seed = operator.saved_tensors("tssa", ctx)
        nothing = (None,) * 6
        if dout is None and dmembership is None:
            return None, None, *nothing
        grad = torch.zeros_like(saved[0]) if dout is None else dout
        options = (key_padding_mask, cu_seqlens, ctx.max_seqlen, seed, ctx.dropout_p, ctx.backend)
        grads = tssa_bwd(grad, dmembership, *saved, *options)
        sources = (dout, dmembership, *saved[:2])
        return *(operator.once_differentiable("tssa", g, *sources) for g in grads), *nothing


@operator.traced_by_autograd
class CausalTSSAFunction(torch.autograd.Function):
    """(out, membership) = tssa_causal_fwd(w, temp, denom_bias, *options), differentiable once."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, temp: Tensor, denom_bias: Tensor | None, *options: Any) -> Any:
        outputs = tssa_causal_fwd(w, temp, denom_bias, *options)
        CausalTSSAFunction.save(ctx, (w, temp, denom_bias, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        w, temp, denom_bias, key_padding_mask, cu_seqlens, ctx.max_seqlen, seed, ctx.dropout_p, ctx.backend = inputs
        ctx.save_for_backward(w, temp, denom_bias, outputs[1], key_padding_mask, cu_seqlens, seed)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dmembership: Tensor | None) -> Any:  # pyright: ignore
        *saved, key_padding_mask, cu_seqlens, seed = operator.saved_tensors("tssa", ctx)
        nothing = (None,) * 6
        if dout is None and dmembership is None:
            return None, None, None, *nothing
        grad = torch.zeros_like(saved[0]) if dout is None else dout
        options = (key_padding_mask, cu_seqlens, ctx.max_seqlen, seed, ctx.dropout_p, ctx.backend)
        grads = tssa_causal_bwd(grad, dmembership, *saved, *options)
        sources = (dout, dmembership, *saved[:3])
        dw, dtemp, ddenom_bias = (operator.once_differentiable("tssa", g, *sources) for g in grads)
        return dw, dtemp, None if saved[2] is None else ddenom_bias, *nothing


operator.functorch_twin(TSSAFunction, tssa_fwd)
operator.functorch_twin(CausalTSSAFunction, tssa_causal_fwd)


def tssa(w: Tensor, temp: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the full form, through autograd only when a gradient is wanted."""
    if operator.needs_grad(w, temp):
        return operator.apply(TSSAFunction, w, temp, *options)[:2]
    return tssa_fwd(w, temp, *options)[:2]


def tssa_causal(w: Tensor, temp: Tensor, denom_bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the causal form, through autograd only when a gradient is wanted."""
    if operator.needs_grad(w, temp, denom_bias):
        return operator.apply(CausalTSSAFunction, w, temp, denom_bias, *options)
    return tssa_causal_fwd(w, temp, denom_bias, *options)
