"""Another value of any argument is another call, also where a plan repeats the one before."""

import inspect

import pytest
import torch

import crate_kernels as ck
from crate_kernels._core import plan
from tests.ops.repeated import NEEDS_PLANS, PACKED, hits, inputs, repeated_calls  # noqa: F401
from tests.tools.plans.replay import same_bits

pytestmark = NEEDS_PLANS

MASK = torch.tensor([[True] * 7 + [False] * 2, [True] * 9])
OFFSETS = {"cu_seqlens": torch.tensor([0, 2, 9], dtype=torch.int32), "max_seqlen": 7}
THRESHOLD = {"phi": "threshold", "threshold": 0.05}
COMMON = {"causal": True, "dropout_p": 0.2, "key_padding_mask": MASK, "backend": "reference"}
STEPS = {"step_size": 0.3, "lambd": 0.4, "backend": "reference"}
# By argument, another value of it; with the options of the repeated call, where it needs some.
VALUES = {
    "mssa": {
        **COMMON,
        "scale": 0.3,
        "phi": ({}, THRESHOLD),
        "threshold": (THRESHOLD, {**THRESHOLD, "threshold": 0.3}),
        "cu_seqlens": (PACKED | {"max_seqlen": 7}, OFFSETS),
        "max_seqlen": (OFFSETS | {"max_seqlen": 8}, OFFSETS),
        "cache": ({"causal": True}, {"causal": True, "cache": lambda: ck.SubspaceCache(2, 3, 9, 16)}),
        "return_lse": True,
    },
    "tssa": {
        **COMMON,
        "denom_bias": ({"causal": True}, {"causal": True, "denom_bias": torch.linspace(0.1, 1, 27).view(3, 9)}),
        "cu_seqlens": (PACKED | {"max_seqlen": 7}, OFFSETS),
        "max_seqlen": (OFFSETS | {"max_seqlen": 8}, OFFSETS),
        "cache": ({"causal": True}, {"causal": True, "cache": lambda: ck.TokenStatsCache(2, 3, 16)}),
        "return_membership": True,
    },
    "ista": {**STEPS, "nonnegative": False, "bias": torch.linspace(-1, 1, 32)},
    "ista_overcomplete": {**STEPS, "steps": 4, "bias": torch.linspace(-1, 1, 32)},
}
ALIKE = ("max_seqlen", "cache", "backend")  # change how a result is found


def of(op, name):
    """Return the options of the call that is repeated, and of the one that differs in an argument."""
    value = VALUES[op][name]
    return value if isinstance(value, tuple) else ({}, {name: value})


def result_of(op, options, tensors):
    """Return what a call returns, as a tuple; a cache is a new one."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    torch.manual_seed(3)
    with torch.no_grad():
        result = getattr(ck, op)(*tensors, **options)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, values in VALUES.items() for name in values])
def test_another_value_of_an_argument_is_obeyed(op, name):
    before, after = of(op, name)
    sizes = {"total": 9} if "cu_seqlens" in after else {}
    tensors = inputs(op, **sizes)
    found = 0
    for _ in range(3):
        found, last = hits(lambda: result_of(op, before, tensors))
    assert found == 1, "the call before is repeated by a plan"
    result = result_of(op, after, tensors)
    plan.forget()
    expected = result_of(op, after, tensors)
    assert len(result) == len(expected)
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))
    if name not in ALIKE:
        assert len(result) != len(last) or not same_bits(result[0], last[0])


@pytest.mark.parametrize("op", VALUES)
def test_every_argument_is_here(op):
    arguments = inspect.signature(getattr(ck, op)).parameters.values()
    assert VALUES[op].keys() == {argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
