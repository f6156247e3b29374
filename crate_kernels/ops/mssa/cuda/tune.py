"""The calls that ``python -m crate_kernels tune`` times for mssa's CUDA C++ kernels: with those of sm_90a."""

from __future__ import annotations

import itertools

import torch

from crate_kernels._core import backends
from crate_kernels._cuda import launch
from crate_kernels._triton.table import Row
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.mssa import native, timed
from crate_kernels.ops.mssa.cuda import heads, hopper, long_rows

_IMAGE = 197  # tokens
_LONG = ((1024, 1024), (4096, None))  # and the bucket of them


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images and beyond, in bf16; nothing where no GPU has these kernels."""
    device = torch.device("cuda")
    if backends.unavailable_reason("mssa", "cpp", device) is not None:
        return []
    if launch.gpu(device).capability != hopper.CAPABILITY:
        return []
    found = []
    for causal, head_dim, gradient in itertools.product((False, True), (64, 128), (True, False)):
        row = Row({}, head_dim, 256, causal, half=True)
        table = heads.BACKWARD if gradient else heads.FORWARD
        found.append(Workload(table, row, timed.dense(native, _IMAGE, head_dim, causal, gradient)))
    for causal, head_dim, (seqlen, bucket) in itertools.product((False, True), (64, 128), _LONG):
        row = Row({}, head_dim, bucket, causal, half=True)
        found.append(Workload(long_rows.FORWARD, row, timed.dense(native, seqlen, head_dim, causal, gradient=False)))
    return found
