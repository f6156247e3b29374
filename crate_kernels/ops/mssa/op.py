"""The op boundary of subspace self-attention: schemas, fakes and the autograd.Function.

Every backend behind it saves the same tensors (w, out, lse, seed), so that any backend's backward
can follow any backend's forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_kernels._core import backends, operator

_OPTIONS = (
    "Tensor? key_padding_mask, Tensor? cu_seqlens, SymInt max_seqlen, Tensor? seed, bool causal, "
    "float scale, float dropout_p, str phi, float threshold, str backend"
)


def _fake_forward(w: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows = (w.shape[1], w.shape[0]) if w.dim() == 3 else w.shape[:3]
    return operator.empty_out(w), w.new_empty(rows, dtype=operator.stat_dtype(w.dtype))


def _fake_backward(dout: Tensor | None, dlse: Tensor | None, w: Tensor, *rest: Any) -> Tensor:
    return operator.empty_out(w)


def _fake_decode(
    w: Tensor,
    data: Tensor,
    lengths: Tensor,
    mask: Any,
    bound: int,
    uniform: bool,
    scale: float,
    need_lse: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    lse = w.new_empty(w.shape[:3] if need_lse else (0,), dtype=operator.stat_dtype(w.dtype))
    return operator.empty_out(w), lse


def _products(w_shape: tuple[int, ...], options: tuple) -> int:
    """FLOP of one (seqlen, seqlen, head_dim) product over the whole call; halved when causal."""
    max_seqlen, causal = options[2], options[4]
    if len(w_shape) == 3:
        # Packed offsets are not shapes: count every sequence as the longest.
        total, nheads, head_dim = w_shape
        product = 2 * nheads * total * max_seqlen * head_dim
    else:
        batch, nheads, seqlen, head_dim = w_shape
        product = 2 * batch * nheads * seqlen * seqlen * head_dim
    return product // 2 if causal else product


# Up to so many new tokens the cpp kernel, which the cache's reading limits, beats the products of composite. With 1024
# cached tokens, composite's time over its own is 1.1-1.3 for 8 new tokens, 0.9-1.0 for 16 and 0.8 for 64, in fp32 and
# bf16 on one AVX-512 thread; in fp16 it is 1.6 for 64 yet.
_CPP_DECODE_TOKENS = 8


def _run_decode(w: Tensor, data: Tensor, lengths: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Decode by the backend; where none was named, by composite's products where they are faster than cpp's kernel."""
    *rest, backend = args
    many = w.shape[2] > _CPP_DECODE_TOKENS and w.dtype != torch.float16
    if many and backend == backends.AUTO and w.device.type == "cpu" and backends.chosen("mssa", backend, w) == "cpp":
        backend = "composite"
    run = partial(backends.run, "mssa", "decode", backend, w, w, data)
    return operator.with_contiguous(lambda held: run(held, *rest), lengths)


_OFFSETS = -8  # cu_seqlens, counted from the end of the options, less the backend


def _kernel(name: str, of: int) -> Any:
    """Return the body of an op whose w is argument ``of``."""

    def run(*args: Any) -> Any:
        *rest, backend = args
        if rest[_OFFSETS] is not None:
            rest[_OFFSETS] = rest[_OFFSETS].contiguous()
        return backends.run("mssa", name, backend, rest[of], *rest)

    return run


mssa_fwd = operator.define(
    f"mssa_fwd(Tensor w, {_OPTIONS}) -> (Tensor, Tensor)",
    _kernel("forward", 0),
    _fake_forward,
    flops=lambda w_shape, *options, out_shape=None, **_: 2 * _products(w_shape, options),
)
mssa_bwd = operator.define(
    f"mssa_bwd(Tensor? dout, Tensor? dlse, Tensor w, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor",
    _kernel("backward", 2),
    _fake_backward,
    flops=lambda dout, dlse, w_shape, out, lse, *options, out_shape=None, **_: 5 * _products(w_shape, options),
)
mssa_decode = operator.define(
    "mssa_decode(Tensor w, Tensor(a!) data, Tensor(b!) lengths, Tensor? key_padding_mask, SymInt bound, "
    "bool uniform, float scale, bool need_lse, str backend) -> (Tensor, Tensor)",
    _run_decode,
    _fake_decode,
)


@operator.traced_by_autograd
class MSSAFunction(torch.autograd.Function):
    """(out, lse) = mssa_fwd(w, *options), differentiable once with respect to w."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        outputs = mssa_fwd(w, *options)
        MSSAFunction.save(ctx, (w, *options), outputs)
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        w, key_padding_mask, cu_seqlens, max_seqlen, seed, *ctx.scalars = inputs
        ctx.max_seqlen = max_seqlen
        ctx.save_for_backward(w, key_padding_mask, cu_seqlens, seed, *outputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore
        w, key_padding_mask, cu_seqlens, seed, out, lse = operator.saved_tensors("mssa", ctx)
        nothing = (None,) * (len(ctx.scalars) + 4)
        if dout is None and dlse is None:
            return None, *nothing
        dw = mssa_bwd(dout, dlse, w, out, lse, key_padding_mask, cu_seqlens, ctx.max_seqlen, seed, *ctx.scalars)
        return operator.once_differentiable("mssa", dw, dout, dlse, w), *nothing


operator.functorch_twin(MSSAFunction, mssa_fwd)


def mssa(w: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Run the op, through autograd only when a gradient is wanted."""
    if operator.needs_grad(w):
        return operator.apply(MSSAFunction, w, *options)
    return mssa_fwd(w, *options)
