"""The calls that ``python -m crate_kernels tune`` times for mssa."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from crate_kernels._triton.table import LaunchRow
from crate_kernels._triton.tune import Prepared, Workload
from crate_kernels.ops.mssa import composite
from crate_kernels.ops.mssa import triton as kernels
from crate_kernels.ops.mssa.call import DecodeCall
from crate_kernels.ops.mssa.timed import dense, draw
from crate_kernels.ops.mssa.triton import tables

_DECODED = 16  # sequences of a timed step of decoding


def _decode(cached: int, head_dim: int, device: str = "cuda") -> Callable[[], Prepared]:
    def make() -> Prepared:
        data = draw(_DECODED, 12, cached + 1, head_dim, device).contiguous()
        w = draw(_DECODED, 12, 1, head_dim, device)
        lengths = torch.full((_DECODED,), cached, dtype=torch.int32, device=device)
        options = DecodeCall(None, cached, True, head_dim**-0.5, False)

        def call() -> Tensor:
            lengths.fill_(cached)  # every step is the same step
            return kernels.decode(w, data, lengths, options)[0]

        call()  # writes the new token, which plain() reads

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            before = lengths.clone().fill_(cached)
            return {"out": composite.decode(w.to(dtype), data.to(dtype), before, options)[0]}

        return Prepared(call, lambda: {"out": call()}, plain, w.dtype)

    return make


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images, of language models and beyond, in bf16."""
    found = []
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        for seqlen, bucket in ((197, 256), (1024, 1024), (4096, None)):
            row = LaunchRow({}, head_dim, bucket, causal, half=True)
            found.append(Workload(tables.FORWARD, row, dense(kernels, seqlen, head_dim, causal, gradient=False)))
            found.append(Workload(tables.BACKWARD, row, dense(kernels, seqlen, head_dim, causal, gradient=True)))
    for head_dim in (64, 128):
        found.append(Workload(tables.DECODE, LaunchRow({}, head_dim, 16, half=True), _decode(8192, head_dim)))
    return found
