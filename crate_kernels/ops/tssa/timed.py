"""The calls of whole sequences that tuning times, of any module with tssa's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_kernels._triton.tune import Prepared
from crate_kernels.ops.tssa import reference
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.sums import saved_sums

_ELEMENTS = 1 << 25  # of w in each timed call: in 16 bits more than the L2 cache of any GPU known of


def whole(
    kernels: Any, nheads: int, head_dim: int, seqlen: int, causal: bool, gradient: bool, device: str = "cuda"
) -> Callable[[], Prepared]:
    """Return what draws a batch that fills the device, for a forward or a backward of ``kernels``."""
    batch = max(_ELEMENTS // (nheads * seqlen * head_dim), 1)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cannot do

    def make() -> Prepared:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        def tokens() -> Tensor:
            return draw(batch, seqlen, nheads, head_dim).transpose(1, 2)

        inputs = [tokens(), 1 + 0.2 * draw(nheads), *([0.02 * draw(nheads, seqlen)] if causal else [])]
        dout, dmembership = tokens(), draw(batch, nheads, seqlen)

        def forward() -> tuple[Tensor, ...]:
            launcher = kernels.forward_causal if causal else kernels.forward
            return launcher(*inputs, TSSACall())

        def backward(dmembership: Tensor | None) -> tuple[Tensor, ...]:
            if not causal:
                return kernels.backward(dout, dmembership, *inputs, *saved, TSSACall())
            call = TSSACall(sums_every=read_every(inputs[0], TSSACall()))
            if call not in sums:  # by the distance, which differs among the kernels that are timed
                sums[call] = saved_sums(inputs[0], saved[0], call)
            return kernels.backward_causal(dout, dmembership, *inputs, saved[0], sums[call], call)

        def results() -> dict[str, Tensor]:
            return named(backward(dmembership.float()) if gradient else forward()[:2])

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            w, temp, *bias = leaves = [t.to(dtype, copy=True).requires_grad_(gradient) for t in inputs]
            if causal:
                outputs = reference.forward_causal(w, temp, bias[0], TSSACall())
            else:
                outputs = reference.forward(w, temp, TSSACall())
            if not gradient:
                return named(outputs)
            return named(torch.autograd.grad(outputs, leaves, (dout.to(dtype), dmembership.to(dtype))))

        def named(values: tuple[Tensor, ...]) -> dict[str, Tensor]:
            names = ("dw", "dtemp", "ddenom_bias") if gradient else ("out", "membership")
            return dict(zip(names, values, strict=False))

        _, *saved = forward()
        sums: dict[TSSACall, Tensor] = {}
        read_every = getattr(kernels, "sums_read_every", lambda *_: 0)
        return Prepared((lambda: backward(None)) if gradient else forward, results, plain, dtype)

    return make
