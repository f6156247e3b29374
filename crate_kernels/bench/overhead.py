"""Times the overhead of a call: tiny tensors, the public function against the op underneath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crate_kernels._core import backends
from crate_kernels.bench import measuring
from crate_kernels.bench.rows import BenchRow
from crate_kernels.testing import SPECS

PROVIDERS = ("raw op", "public", "public with gradient")
OPS = tuple(op for op, spec in SPECS.items() if spec.tiny)
CALLS = 200


def _call(op: str, provider: str, device: torch.device) -> Callable[[], Any]:
    spec = SPECS[op]
    if spec.tiny is None:
        raise ValueError(f"{op} has no tiny call")
    tracked = provider.endswith("gradient")
    calls = spec.tiny(device, tracked, backends.resolve(spec.package, None, device, torch.float32))
    return calls[provider.removesuffix(" with gradient")]


def blank(op: str, provider: str) -> BenchRow:
    """Return the row of an operator's call, without results."""
    return BenchRow("overhead", op, f"{CALLS} tiny calls", "fp32", "forward", provider, unit="calls", amount=CALLS)


def measure(row: BenchRow, device: torch.device, timer: measuring.Timer) -> BenchRow:
    """Time ``CALLS`` calls one after another."""
    one = _call(row.op, row.provider, device)

    def many() -> None:
        for _ in range(CALLS):
            one()

    row.seconds = timer(many, tuple)
    return row
