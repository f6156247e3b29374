"""The calls that ``python -m crate_kernels tune`` times for tssa's CUDA C++ kernels of sm_90a and others."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from crate_kernels._cuda import launch
from crate_kernels._triton.table import Config, LaunchRow, Table
from crate_kernels._triton.tune import Workload
from crate_kernels.ops.tssa import native, timed
from crate_kernels.ops.tssa.cuda import persistent, walking

_IMAGES = ((4, 48), (8, 48), (16, 48))  # heads and channels of ToST's models of images


def workloads() -> list[Workload]:
    """List what is timed: the lengths of images and of texts, in bf16; nothing where no GPU has the kernels."""
    if not launch.serves("tssa", persistent.CAPABILITY):
        return []
    images = itertools.product(_IMAGES, (196, 784, 4096), (persistent.FORWARD, persistent.BACKWARD))
    texts = itertools.product(walking.TEXTS, (1024,), (walking.FORWARD, walking.BACKWARD))
    return [
        _workload(table, *shape, seqlen, causal)
        for causal, cases in ((False, images), (True, texts))
        for shape, seqlen, table in cases
    ]


def _workload(table: Table, nheads: int, head_dim: int, seqlen: int, causal: bool) -> Workload:
    """Return a workload whose candidates are those that fit: another would time the kernels of forms.py again."""
    gradient, gpu = table in (persistent.BACKWARD, walking.BACKWARD), launch.gpu(torch.device("cuda"))

    def fits(config: Config) -> bool:
        if causal:
            bytes_ = walking.shared_bytes(nheads, head_dim, gradient, config)
        else:
            bytes_ = persistent.shared_bytes(nheads, head_dim, seqlen, gradient, config)
        return persistent.block_of(nheads * head_dim, bytes_, config, gpu) is not None

    row = LaunchRow({}, nheads * head_dim, 1 << (seqlen - 1).bit_length(), half=True)
    fitting = replace(table, candidates=tuple(filter(fits, table.candidates)))
    return Workload(fitting, row, timed.whole(native, nheads, head_dim, seqlen, causal, gradient))
