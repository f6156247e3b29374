"""The calls that ``python -m crate_kernels tune`` times for mssa."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._triton.table import Row
from crate_kernels._triton.tune import Prepared, Workload
from crate_kernels.ops.mssa import composite, reference
from crate_kernels.ops.mssa import triton as kernels
from crate_kernels.ops.mssa.call import Call, DecodeCall
from crate_kernels.ops.mssa.triton import tables

_TOKENS = 1 << 19  # of each timed call, over batch and heads: waves enough that a short last one does not count
_DECODED = 16  # sequences of a timed step of decoding


def _draw(batch: int, nheads: int, seqlen: int, head_dim: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, seqlen, nheads, head_dim, generator=generator)  # for all of the batch: the host draws slowly
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cannot do
    return (w * 3**-0.5).to(device, dtype).repeat(batch, 1, 1, 1).transpose(1, 2)


def _dense(seqlen: int, head_dim: int, causal: bool, gradient: bool, device: str = "cuda") -> Callable[[], Prepared]:
    def make() -> Prepared:
        w = _draw(max(_TOKENS // (12 * seqlen), 1), 12, seqlen, head_dim, device)
        options = Call(causal=causal, scale=head_dim**-0.5)
        g = w.flip(2)
        out, lse = kernels.forward(w, options)
        name = "dw" if gradient else "out"

        def call() -> Tensor:
            return kernels.backward(g, None, w, out, lse, options) if gradient else kernels.forward(w, options)[0]

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            with torch.set_grad_enabled(gradient):
                x = w[:1, :1].detach().to(dtype).requires_grad_(gradient)
                result, _ = reference.forward(x, options)
                return {name: torch.autograd.grad(result, x, g[:1, :1].to(dtype))[0] if gradient else result}

        return Prepared(call, lambda: {name: call()[:1, :1]}, plain, w.dtype)

    return make


def _decode(cached: int, head_dim: int, device: str = "cuda") -> Callable[[], Prepared]:
    def make() -> Prepared:
        data = _draw(_DECODED, 12, cached + 1, head_dim, device).contiguous()
        w = _draw(_DECODED, 12, 1, head_dim, device)
        lengths = torch.full((_DECODED,), cached, dtype=torch.int32, device=device)
        options = DecodeCall(None, cached, True, head_dim**-0.5, False)

        def call() -> Tensor:
            lengths.fill_(cached)  # every step is the same step
            return kernels.decode(w, data, lengths, options)[0]

        call()  # writes the new token, which plain() reads

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            held = lengths.clone().fill_(cached)
            return {"out": composite.decode(w.to(dtype), data.to(dtype), held, options)[0]}

        return Prepared(call, lambda: {"out": call()}, plain, w.dtype)

    return make


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images, of language models and beyond, in bf16."""
    found = []
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        for seqlen, bucket in ((197, 256), (1024, 1024), (4096, None)):
            row = Row({}, head_dim, bucket, causal, half=True)
            found.append(Workload(tables.FORWARD, row, _dense(seqlen, head_dim, causal, gradient=False)))
            found.append(Workload(tables.BACKWARD, row, _dense(seqlen, head_dim, causal, gradient=True)))
    for head_dim in (64, 128):
        found.append(Workload(tables.DECODE, Row({}, head_dim, 16, half=True), _decode(8192, head_dim)))
    return found
