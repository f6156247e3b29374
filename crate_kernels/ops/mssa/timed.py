"""The calls of whole sequences that tuning times, of any module with mssa's ``forward`` and ``backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton.tune import Prepared
from crate_kernels.ops.mssa import reference
from crate_kernels.ops.mssa.call import MSSACall

_TOKENS = 1 << 19  # of each timed call, over batch and heads: waves enough that a short last one does not count


def draw(batch: int, nheads: int, seqlen: int, head_dim: int, device: str) -> Tensor:
    """Draw tokens as heads cut from a projection."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, seqlen, nheads, head_dim, generator=generator)  # for all of the batch: the host draws slowly
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cannot do
    return (w * 3**-0.5).to(device, dtype).repeat(batch, 1, 1, 1).transpose(1, 2)


def dense(
    kernels: Any, seqlen: int, head_dim: int, causal: bool, gradient: bool, device: str = "cuda"
) -> Callable[[], Prepared]:
    """Return what prepares a forward, or a backward, of ``kernels``."""

    def make() -> Prepared:
        w = draw(max(_TOKENS // (12 * seqlen), 1), 12, seqlen, head_dim, device)
        options = MSSACall(causal=causal, scale=head_dim**-0.5)
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
