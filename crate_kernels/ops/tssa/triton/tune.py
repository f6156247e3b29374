"""The calls that ``python -m crate_kernels tune`` times for tssa."""

from __future__ import annotations

from collections.abc import Callable

from crate_kernels._triton.table import LaunchRow, Table
from crate_kernels._triton.tune import Prepared, Workload
from crate_kernels.ops.tssa import timed
from crate_kernels.ops.tssa import triton as kernels
from crate_kernels.ops.tssa.triton import tables


def _make(table: Table, nheads: int, head_dim: int, seqlen: int, device: str = "cuda") -> Callable[[], Prepared]:
    """Return what draws a batch for the launcher of ``table``."""
    causal = table in (tables.CAUSAL_FORWARD, tables.CAUSAL_BACKWARD)
    gradient = table in (tables.FULL_BACKWARD, tables.CAUSAL_BACKWARD)
    return timed.whole(kernels, nheads, head_dim, seqlen, causal, gradient, device)


def workloads() -> list[Workload]:
    """List what is timed: ToST's widths at the lengths of images, of its language models and beyond, in bf16."""
    full, causal = tables.TABLES[:2], tables.TABLES[2:]
    images = [(heads, 48, seqlen) for heads in (4, 8, 16) for seqlen in ((196, 256), (784, 1024), (4096, None))]
    texts = [(heads, 64, seqlen) for heads in (12, 16, 20) for seqlen in ((1024, 1024), (4096, None))]
    return [
        Workload(table, LaunchRow({}, nheads * head_dim, bucket, half=True), _make(table, nheads, head_dim, seqlen))
        for chosen, shapes in ((full, images), (causal, texts))
        for nheads, head_dim, (seqlen, bucket) in shapes
        for table in chosen
    ]
