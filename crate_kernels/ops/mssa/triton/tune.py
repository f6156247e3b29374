"""What ``python -m crate_kernels tune`` times for mssa."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._triton.launch import Row
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.mssa import composite, reference
from crate_kernels.ops.mssa.call import Call, DecodeCall
from crate_kernels.ops.mssa.triton import launch as kernels
from crate_kernels.ops.mssa.triton import tables

_TOKENS = 1 << 16  # of each timed call, over batch and heads


def _call(head_dim: int, causal: bool) -> Call:
    return Call(None, None, 0, None, causal, head_dim**-0.5, 0.0, None)


def _draw(batch: int, nheads: int, seqlen: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(batch, seqlen, nheads, head_dim, generator=generator)
    return (w * 3**-0.5).to("cuda", torch.bfloat16).transpose(1, 2)


def _close(actual: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Whether an output is at most twice as wrong as eager PyTorch's, as the tests have it."""
    allowed = 2 * ((eager - exact).abs().max() + torch.finfo(actual.dtype).eps * exact.abs().max())
    return bool((actual - exact).abs().max() <= allowed)


def _forward(seqlen: int, head_dim: int, causal: bool) -> Callable:
    def make() -> tuple[Callable[[], object], Callable[[], bool]]:
        w = _draw(max(_TOKENS // (12 * seqlen), 1), 12, seqlen, head_dim)
        options = _call(head_dim, causal)
        small = w[:1, :1]
        eager, exact = (reference.forward(x, options)[0] for x in (small, small.double()))

        def call(x: Tensor = w) -> Tensor:
            return kernels.forward(x, options)[0]

        return call, lambda: _close(call()[:1, :1], eager, exact)

    return make


def _backward(seqlen: int, head_dim: int, causal: bool) -> Callable:
    def make() -> tuple[Callable[[], object], Callable[[], bool]]:
        w = _draw(max(_TOKENS // (12 * seqlen), 1), 12, seqlen, head_dim)
        options = _call(head_dim, causal)
        g = w.flip(2)
        out, lse = kernels.forward(w, options)

        def gradient(x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                result, _ = reference.forward(x, options)
                return torch.autograd.grad(result, x, g[:1, :1].to(x.dtype))[0]

        eager, exact = gradient(w[:1, :1]), gradient(w[:1, :1].double())

        def call() -> Tensor:
            return kernels.backward(g, None, w, out, lse, options)

        return call, lambda: _close(call()[:1, :1], eager, exact)

    return make


def _decode(cached: int, head_dim: int) -> Callable:
    def make() -> tuple[Callable[[], object], Callable[[], bool]]:
        data, w = _draw(16, 12, cached + 1, head_dim).contiguous(), _draw(16, 12, 1, head_dim)
        lengths = torch.full((16,), cached, dtype=torch.int32, device="cuda")
        step = DecodeCall(None, cached, True, head_dim**-0.5, False)

        def call() -> Tensor:
            lengths.fill_(cached)  # every step is the same step
            return kernels.decode(w, data, lengths, step)[0]

        call()

        def plain(dtype: torch.dtype) -> Tensor:
            held = lengths.clone().fill_(cached)
            return composite.decode(w.to(dtype), data.to(dtype), held, step)[0]

        eager, exact = plain(w.dtype), plain(torch.float64)
        return call, lambda: _close(call(), eager, exact)

    return make


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images, of language models and beyond, in bf16."""
    found = []
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        for seqlen, bucket in ((197, 256), (1024, 1024), (4096, None)):
            row = Row({}, head_dim, bucket, causal, half=True)
            found.append(Workload(tables.FORWARD, row, _forward(seqlen, head_dim, causal)))
            found.append(Workload(tables.BACKWARD, row, _backward(seqlen, head_dim, causal)))
    for head_dim in (64, 128):
        found.append(Workload(tables.DECODE, Row({}, head_dim, 16, half=True), _decode(8192, head_dim)))
    return found
