"""Kernels move tokens of 16 bits by many at once, never one by one."""

import pytest

from tests.tools.aot import harness

harness.needs_compiler()

from tests.tools.aot import families, wide  # noqa: E402  # only where Triton compiles

# The combination of a step's splits writes one row of out a head.
ONE_BY_ONE = {"_mssa_combine_kernel"}
QUICK = ("ista-d768", "tssa_forward-d64-n4096")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive)
        for name in families.FAMILIES
        if not name.startswith(("mssa_forward", "mssa_backward"))
    ],
)
def test_no_kernel_moves_tokens_one_by_one(name):
    launches = families.launches(name, "sm_90", harness.launches)
    found = {each.function.__name__: wide.narrow(each, "sm_90") for each in launches}
    assert found
    assert {kernel for kernel, opcodes in found.items() if opcodes} <= ONE_BY_ONE
