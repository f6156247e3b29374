"""Every form of ista in many widths and dtypes on every GPU: ``make aot``. Not collected by name: it takes minutes."""

import itertools

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.ista.aot import HALF, SINGLE, overcomplete, step  # noqa: E402  # only where Triton compiles

DTYPES = {
    "bf16": (HALF, HALF),
    "fp16": (torch.float16, torch.float16),
    "fp32": (SINGLE, SINGLE),
    "autocast": (SINGLE, HALF),
}
CALLS = {
    **{
        f"ista-{tokens}x{dim}-{name}{'' if nonnegative else '-soft'}": step(tokens, dim, *dtypes, nonnegative)
        for tokens, dim, nonnegative in itertools.product((1, 197, 12608), (192, 768, 1000), (True, False))
        for name, dtypes in DTYPES.items()
    },
    **{
        f"ista-overcomplete-{tokens}x{dim}-{str(dtype)[6:]}": overcomplete(tokens, dim, 4 * dim, dtype)
        for tokens, dim, dtype in itertools.product((1, 197, 12608), (192, 768), (HALF, SINGLE))
    },
}


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_limits(name, target):
    assert harness.over_limits(harness.compiled(CALLS[name], target), target, name, True) == []
