"""The calls that ``python -m crate_kernels tune`` times for tssa."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._triton.table import Row, Table
from crate_kernels._triton.tune import Prepared, Workload
from crate_kernels.ops.tssa import reference
from crate_kernels.ops.tssa import triton as kernels
from crate_kernels.ops.tssa.call import Call
from crate_kernels.ops.tssa.triton import tables

_ELEMENTS = 1 << 25  # of w in each timed call: in 16 bits more than the L2 cache of any GPU known of


def _make(table: Table, nheads: int, head_dim: int, seqlen: int, device: str = "cuda") -> Callable[[], Prepared]:
    """Return what draws a batch that fills the device, for the launcher of ``table``."""
    causal = table in (tables.CAUSAL_FORWARD, tables.CAUSAL_BACKWARD)
    is_backward = table in (tables.FULL_BACKWARD, tables.CAUSAL_BACKWARD)
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
            launcher: Callable = kernels.forward_causal if causal else kernels.forward
            return launcher(*inputs, Call())

        def backward(dmembership: Tensor | None) -> tuple[Tensor, ...]:
            launcher: Callable = kernels.backward_causal if causal else kernels.backward
            return launcher(dout, dmembership, *inputs, *saved, Call())

        def results() -> dict[str, Tensor]:
            return named(backward(dmembership.float()) if is_backward else forward()[:2])

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            w, temp, *bias = leaves = [t.to(dtype, copy=True).requires_grad_(is_backward) for t in inputs]
            if causal:
                outputs = reference.forward_causal(w, temp, bias[0], Call())
            else:
                outputs = reference.forward(w, temp, Call())
            if not is_backward:
                return named(outputs)
            return named(torch.autograd.grad(outputs, leaves, (dout.to(dtype), dmembership.to(dtype))))

        def named(values: tuple[Tensor, ...]) -> dict[str, Tensor]:
            names = ("dw", "dtemp", "ddenom_bias") if is_backward else ("out", "membership")
            return dict(zip(names, values, strict=False))

        _, *saved = forward()
        return Prepared((lambda: backward(None)) if is_backward else forward, results, plain, dtype)

    return make


def workloads() -> list[Workload]:
    """List what is timed: ToST's widths at the lengths of images, of its language models and beyond, in bf16."""
    full, causal = tables.TABLES[:2], tables.TABLES[2:]
    images = [(heads, 48, seqlen) for heads in (4, 8, 16) for seqlen in ((196, 256), (784, 1024), (4096, None))]
    texts = [(heads, 64, seqlen) for heads in (12, 16, 20) for seqlen in ((1024, 1024), (4096, None))]
    return [
        Workload(table, Row({}, nheads * head_dim, bucket, half=True), _make(table, nheads, head_dim, seqlen))
        for chosen, shapes in ((full, images), (causal, texts))
        for nheads, head_dim, (seqlen, bucket) in shapes
        for table in chosen
    ]
