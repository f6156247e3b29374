"""Calls of every kind, small, for the tests of plans: on cpp, with inputs that a seed draws."""

from functools import partial

import pytest
import torch

import crate_kernels as ck
from crate_kernels._core import backends, plan
from crate_kernels._native import extension
from tests.ops.common import outputs_and_gradients, randn

NEEDS_PLANS = pytest.mark.skipif(
    extension.PATH is None or backends._INTERPRETED,
    reason="needs python -m crate_kernels build, and TRITON_INTERPRET unset",
)


@pytest.fixture(autouse=True)
def repeated_calls():
    """Record at the second sight of a kind, as users' calls are: of the modules that import it."""
    plan.forget()
    yield
    plan.forget()


class Wrapped(torch.nn.Module):
    """A module of a call, for what takes modules alone."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def inputs(op, seed=0, **sizes):
    if op in ("mssa", "tssa"):
        shape = (sizes.get("batch", 2), 3, sizes.get("seqlen", 9), sizes.get("head_dim", 16))
        shape = (sizes["total"], *shape[1::2]) if "total" in sizes else shape
        w = randn(*shape, seed=seed, dtype=sizes.get("dtype", torch.float32))
        return (w,) if op == "mssa" else (w, torch.linspace(0.5, 1.5, 3))
    x = randn(2, sizes.get("seqlen", 40), 32, seed=seed, dtype=sizes.get("dtype", torch.float32))
    weights = [randn(32, 32, seed=seed + more, dtype=x.dtype) / 6 for more in ((1, 2) if "decoder" in sizes else (1,))]
    return x, *weights


PACKED = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32), "max_seqlen": 5}
CALLS = {
    "mssa": ("mssa", {}),
    "mssa-causal": ("mssa", {"causal": True}),
    "mssa-lse": ("mssa", {"return_lse": True}),
    "mssa-mask": ("mssa", {"key_padding_mask": torch.tensor([[True] * 7 + [False] * 2, [True] * 9])}),
    "mssa-dropout": ("mssa", {"dropout_p": 0.2}),
    "mssa-packed": ("mssa", {**PACKED, "return_lse": True}, {"total": 9}),
    "tssa": ("tssa", {}),
    "tssa-members": ("tssa", {"return_membership": True}),
    "tssa-mask": ("tssa", {"key_padding_mask": torch.tensor([[True] * 7 + [False] * 2, [True] * 9])}),
    "tssa-packed": ("tssa", PACKED, {"total": 10}),
    "tssa-causal": ("tssa", {"causal": True}),
    "tssa-causal-packed": ("tssa", {**PACKED, "causal": True, "dropout_p": 0.2}, {"total": 9}),
    "tssa-bias": ("tssa", {"causal": True, "denom_bias": torch.linspace(0.1, 1, 36).view(3, 12, 1)}),
    "ista": ("ista", {}),
    "ista-two-sided": ("ista", {"nonnegative": False}),
    "ista-few": ("ista", {}, {"seqlen": 2}),
    "ista-overcomplete": ("ista_overcomplete", {}),
    "ista-decoder": ("ista_overcomplete", {"steps": 3}, {"decoder": True}),
}
EACH = ("mssa", "tssa", "tssa-causal", "ista", "ista-overcomplete")


def call_of(name):
    op, options, *sizes = CALLS[name]
    return partial(getattr(ck, op), **options, backend="cpp"), partial(inputs, op, **(sizes[0] if sizes else {}))


def both(call, tensors):
    """Return outputs and gradients, with the same draw of a seed."""
    torch.manual_seed(3)
    return outputs_and_gradients(call, *tensors)


def hits(function):
    """Return how many plans ran in a call, and its result."""
    before = plan.counts()[0]
    result = function()
    return plan.counts()[0] - before, result


def known(name="mssa"):
    """Return a call and its inputs, three times made."""
    call, make = call_of(name)
    for seed in range(3):
        both(call, make(seed=seed))
        with torch.no_grad():
            call(*make(seed=seed))
    return call, make
