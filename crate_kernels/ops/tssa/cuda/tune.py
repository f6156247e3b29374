"""The calls that ``python -m crate_kernels tune`` times for tssa's CUDA C++ kernels: persistent ones and others."""

from __future__ import annotations

import itertools

import torch

from crate_kernels._core import backends
from crate_kernels._cuda import launch
from crate_kernels._triton.table import LaunchRow
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.tssa import native, timed
from crate_kernels.ops.tssa.cuda import persistent

_SHAPES = ((4, 48), (8, 48), (16, 48))  # heads and channels of ToST's models of images


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images, in bf16; nothing where no GPU has the kernels."""
    device = torch.device("cuda")
    if backends.unavailable_reason("tssa", "cpp", device) is not None:
        return []
    if launch.gpu(device).capability != persistent.CAPABILITY:
        return []
    found = []
    for (nheads, head_dim), seqlen, gradient in itertools.product(_SHAPES, (196, 784), (False, True)):
        row = LaunchRow({}, nheads * head_dim, 1 << (seqlen - 1).bit_length(), half=True)
        table = persistent.BACKWARD if gradient else persistent.FORWARD
        found.append(Workload(table, row, timed.whole(native, nheads, head_dim, seqlen, False, gradient)))
    return found
