"""The calls that ``python -m crate_kernels tune`` times for mssa's CUDA C++ kernels: with those of sm_90a."""

from __future__ import annotations

import itertools

from crate_kernels._cuda import launch
from crate_kernels._triton.table import LaunchRow
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.mssa import native, timed
from crate_kernels.ops.mssa.cuda import heads, hopper, long_pairs, long_rows

_IMAGE = 197  # tokens
_LONG = ((1024, 1024), (4096, None))  # and the bucket of them


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images and beyond, in bf16; nothing where no GPU has these kernels."""
    if not launch.serves("mssa", hopper.CAPABILITY):
        return []
    found = []
    every = [(heads, _IMAGE, 256), *((long_rows, *one) for one in _LONG), *((long_pairs, *one) for one in _LONG)]
    for (kernels, seqlen, bucket), causal, head_dim in itertools.product(every, (False, True), (64, 128)):
        row = LaunchRow({}, head_dim, bucket, causal, half=True)
        for direction in ("forward", "backward"):
            table = getattr(kernels, direction.upper(), None)  # pairs have a backward alone
            if table is not None:
                make = timed.dense(native, seqlen, head_dim, causal, direction == "backward")
                found.append(Workload(table, row, make))
    return found
