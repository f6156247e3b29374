"""The calls that ``python -m crate_kernels tune`` times for mssa's CUDA C++ kernels: with whole heads and without."""

from __future__ import annotations

import itertools

import torch

from crate_kernels._core import backends
from crate_kernels._cuda import launch
from crate_kernels._triton.table import Row
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.mssa import native, timed
from crate_kernels.ops.mssa.cuda import heads

_IMAGE = 197  # tokens


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images, in bf16; nothing where no GPU has the kernels of whole heads."""
    device = torch.device("cuda")
    if backends.unavailable_reason("mssa", "cpp", device) is not None:
        return []
    if launch.gpu(device).capability != heads.CAPABILITY:
        return []
    found = []
    for causal, head_dim, gradient in itertools.product((False, True), (64, 128), (True, False)):
        row = Row({}, head_dim, 256, causal, half=True)
        table = heads.BACKWARD if gradient else heads.FORWARD
        found.append(Workload(table, row, timed.dense(native, _IMAGE, head_dim, causal, gradient)))
    return found
