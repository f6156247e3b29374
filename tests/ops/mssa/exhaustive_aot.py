"""Every head_dim and dtype on every GPU: ``make aot``. Not collected by name, for it takes many minutes."""

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.mssa.aot import backward, between, decode, forward  # noqa: E402  # only where Triton compiles

# name: (what makes the call, seqlen, head_dim, dtype, causal); lengths have separate rows in launch tables, and 197 a
# narrow last block
CALLS = {
    f"{what}-{seqlen}-{head_dim}-{str(dtype)[6:]}{'-causal' * causal}": (make, seqlen, head_dim, dtype, causal)
    for what, make in (("forward", forward), ("backward", backward))
    for seqlen in (197, 1024)
    for head_dim in (16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 128, 160, 192, 256)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for causal in (False, True)
    if seqlen == 1024 or (head_dim <= 128 and dtype != torch.float32)
}
# name: (number of new tokens, head_dim, dtype)
STEPS = {
    f"decode-{new}-{head_dim}-{str(dtype)[6:]}": (new, head_dim, dtype)
    for new in (1, 8, 512)
    for head_dim in (16, 48, 64, 72, 80, 88, 104, 112, 128, 256)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}
# name: (whether of the backward, head_dim, dtype, causal)
RANGES = {
    f"between-{head_dim}-{str(dtype)[6:]}{'-causal' * causal}{'-backward' * back}": (back, head_dim, dtype, causal)
    for back in (False, True)
    for head_dim in (16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 128)
    for dtype in (torch.bfloat16, torch.float16)
    for causal in (False, True)
}


def strict(head_dim, dtype):
    """Whether a kernel has to do without spilling on the GPUs of harness.STRICT."""
    return dtype != torch.float32 and head_dim <= 128


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_limits(name, target):
    make, seqlen, head_dim, dtype, causal = CALLS[name]
    kernels = harness.compiled(make(seqlen, head_dim, dtype, causal=causal), target)
    assert harness.over_limits(kernels, target, name, strict(head_dim, dtype)) == []


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", STEPS)
def test_decoding_compiles_within_limits(name, target):
    new, head_dim, dtype = STEPS[name]
    kernels = harness.compiled(decode(new, head_dim, dtype), target)
    assert harness.over_limits(kernels, target, name, strict(head_dim, dtype)) == []


@pytest.mark.parametrize("target", harness.STRICT)
@pytest.mark.parametrize("name", RANGES)
def test_ranges_compile_within_limits(name, target):
    back, head_dim, dtype, causal = RANGES[name]
    kernels = harness.compiled(between(back, 1024, head_dim, dtype, causal=causal), target)
    assert harness.over_limits(kernels, target, name, strict(head_dim, dtype)) == []
