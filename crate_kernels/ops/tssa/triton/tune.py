"""What ``python -m crate_kernels tune`` times for tssa."""

from __future__ import annotations

from collections.abc import Callable

import torch

from crate_kernels import testing
from crate_kernels._triton.launch import Row, Table
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.tssa import triton as kernels
from crate_kernels.ops.tssa.triton import tables

_ELEMENTS = 1 << 25  # of w in each timed call: in 16 bits more than the L2 cache of any GPU known of
_OPTIONS = (None, None, 0, None, 0.0)


def _make(table: Table, nheads: int, head_dim: int, seqlen: int, device: str = "cuda") -> Callable:
    """Return what prepares a workload: a batch that fills the device, with the launchers of ``table`` to time."""
    causal = table in (tables.CAUSAL_FORWARD, tables.CAUSAL_BACKWARD)
    shape = (max(_ELEMENTS // (nheads * seqlen * head_dim), 1), nheads, seqlen, head_dim)
    case = testing.Case("tssa", f"tune-{table.name}", shape, {"causal": causal, "return_membership": True})

    def make() -> tuple[Callable[[], object], Callable[[], bool]]:
        dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cannot do
        inputs = testing.make_inputs(case, dtype, device)
        w, temp = inputs.differentiable["w"], inputs.differentiable["temp"].flatten()
        exact = testing.run(case, inputs.to(torch.float64), "reference")
        eager = testing.run(case, inputs, "reference")

        def is_right() -> bool:
            return all(m.passed for m in testing.measure(testing.run(case, inputs, "triton"), eager, exact, dtype))

        if not causal:
            out, members, energy, moment = kernels.forward(w, temp, *_OPTIONS)
            if table is tables.FULL_FORWARD:
                return lambda: kernels.forward(w, temp, *_OPTIONS), is_right
            return lambda: kernels.backward(out, None, w, temp, members, energy, moment, *_OPTIONS), is_right
        bias = inputs.differentiable["denom_bias"][:, :seqlen, 0]
        out, membership = kernels.forward_causal(w, temp, bias, *_OPTIONS)
        if table is tables.CAUSAL_FORWARD:
            return lambda: kernels.forward_causal(w, temp, bias, *_OPTIONS), is_right
        return lambda: kernels.backward_causal(out, None, w, temp, bias, membership, *_OPTIONS), is_right

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
