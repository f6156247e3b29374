"""What a call costs beside its kernel: tiny tensors, the public function against the op underneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crate_kernels import ista, mssa, tssa
from crate_kernels._core import backends
from crate_kernels.bench import measuring
from crate_kernels.bench.rows import Row

PROVIDERS = ("raw op", "public", "public with gradient")
OPS = ("mssa", "tssa", "ista")
CALLS = 200


def _call(op: str, provider: str, device: torch.device) -> Callable[[], Any]:
    backend = backends.resolve(op, None, device, torch.float32)
    tracked = provider.endswith("gradient")
    if op == "ista":
        x, weight = torch.randn(4, 32, device=device), torch.randn(32, 32, device=device)
        x.requires_grad_(tracked)
        if provider == "raw op":
            return lambda: torch.ops.crate_kernels.ista_fwd(x, weight, 0.1, 0.1, True, torch.float32, backend)
        return lambda: ista(x, weight)
    w = torch.randn(1, 2, 4, 32, device=device, requires_grad=tracked)
    if op == "mssa":
        if provider == "raw op":
            options = (None, None, 0, None, False, 32**-0.5, 0.0, "softmax", 0.0, backend)
            return lambda: torch.ops.crate_kernels.mssa_fwd(w, *options)
        return lambda: mssa(w)
    temp = torch.ones(2, 1, device=device)
    if provider == "raw op":
        return lambda: torch.ops.crate_kernels.tssa_fwd(w, temp, None, None, 0, None, 0.0, backend)
    return lambda: tssa(w, temp)


def blank(op: str, provider: str) -> Row:
    """Return the row of an operator's call before anything is known of it."""
    return Row("overhead", op, f"{CALLS} tiny calls", "fp32", "forward", provider, unit="calls", amount=CALLS)


def measure(row: Row, device: torch.device, timer: measuring.Timer) -> Row:
    """Time ``CALLS`` calls one after another."""
    one = _call(row.op, row.provider, device)

    def many() -> None:
        for _ in range(CALLS):
            one()

    row.seconds = timer(many, tuple)
    return row
